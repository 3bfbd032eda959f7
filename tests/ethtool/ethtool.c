/* Answers SIOCETHTOOL from text files instead of a driver: LD_PRELOAD=ethtool.so, everything else goes to the kernel.
 *
 * $ETHTOOL_DIR/INTERFACE is what `ethtool -S` prints, a line a counter, `name: value`. Lines that start with # set:
 *   # driver NAME     what GDRVINFO says
 *   # errno N         every request fails with it, but GDRVINFO
 *   # strict          a count that is outdated gets nothing, as from Linux 6.19 on; before, it is ignored
 * No file: ENODEV. A file may be replaced (rename) at any time.
 * $ETHTOOL_DELAY_US: what each request takes. $ETHTOOL_LOG: a line a request, `INTERFACE COMMAND`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NICS 64
#define COUNTERS 8192

struct nic {
	char name[IFNAMSIZ], driver[32];
	struct timespec changed;
	ino_t inode;
	int error, strict;
	unsigned count;
	char (*names)[ETH_GSTRING_LEN];
	unsigned long long *values;
};

static struct nic nics[NICS];

static void parse(struct nic *nic, FILE *file)
{
	char line[4096], *colon, *end;

	strcpy(nic->driver, "stub");
	nic->error = nic->strict = 0;
	nic->count = 0;
	while (fgets(line, sizeof line, file)) {
		if (sscanf(line, "# driver %31s", nic->driver) == 1 || sscanf(line, "# errno %d", &nic->error) == 1)
			continue;
		if (!strncmp(line, "# strict", 8))
			nic->strict = 1;
		end = line + strcspn(line, "\n");
		*end = 0;
		colon = memrchr(line, ':', end - line);
		if (*line == '#' || !colon || nic->count == COUNTERS)
			continue;
		*colon = 0;
		memset(nic->names[nic->count], 0, ETH_GSTRING_LEN);
		memcpy(nic->names[nic->count], line, strnlen(line, ETH_GSTRING_LEN));
		nic->values[nic->count++] = strtoull(colon + 1, NULL, 10);
	}
}

static struct nic *find(const char *name)
{
	char path[4096];
	struct stat now;
	struct nic *nic = nics;
	FILE *file;

	snprintf(path, sizeof path, "%s/%.15s", getenv("ETHTOOL_DIR"), name);
	if (stat(path, &now))
		return NULL;
	while (nic < nics + NICS - 1 && *nic->name && strncmp(nic->name, name, IFNAMSIZ))
		nic++;
	if (nic->inode == now.st_ino && !memcmp(&nic->changed, &now.st_mtim, sizeof now.st_mtim))
		return nic;
	if (!nic->names) {
		nic->names = calloc(COUNTERS, ETH_GSTRING_LEN);
		nic->values = calloc(COUNTERS, sizeof *nic->values);
	}
	file = fopen(path, "r");
	if (!file)
		return NULL;
	memcpy(nic->name, name, IFNAMSIZ);
	nic->inode = now.st_ino;
	nic->changed = now.st_mtim;
	parse(nic, file);
	fclose(file);
	return nic;
}

static int answer(struct nic *nic, void *data)
{
	struct ethtool_drvinfo *driver = data;
	struct ethtool_sset_info *set = data;
	struct ethtool_gstrings *strings = data;
	struct ethtool_stats *stats = data;

	if (driver->cmd != ETHTOOL_GDRVINFO && nic->error)
		return nic->error;
	switch (driver->cmd) {
	case ETHTOOL_GDRVINFO:
		memset((char *)data + 4, 0, sizeof *driver - 4);
		memcpy(driver->driver, nic->driver, sizeof driver->driver);
		driver->n_stats = nic->count;
		return 0;
	case ETHTOOL_GSSET_INFO:
		set->sset_mask &= nic->count ? 1ULL << ETH_SS_STATS : 0;
		if (set->sset_mask)
			set->data[0] = nic->count;
		return 0;
	case ETHTOOL_GSTRINGS:
		strings->len = nic->strict && strings->len && strings->len != nic->count ? 0 : nic->count;
		memcpy(strings->data, nic->names, (size_t)strings->len * ETH_GSTRING_LEN);
		return 0;
	case ETHTOOL_GSTATS:
		stats->n_stats = nic->strict && stats->n_stats && stats->n_stats != nic->count ? 0 : nic->count;
		memcpy(stats->data, nic->values, (size_t)stats->n_stats * sizeof *nic->values);
		return 0;
	}
	return EOPNOTSUPP;
}

static void written(const struct ifreq *request)
{
	const char *path = getenv("ETHTOOL_LOG");
	FILE *file = path ? fopen(path, "a") : NULL;

	if (!file)
		return;
	fprintf(file, "%.15s %u\n", request->ifr_name, *(unsigned *)request->ifr_data);
	fclose(file);
}

int ioctl(int fd, unsigned long what, ...)
{
	static int (*next)(int, unsigned long, ...);
	struct ifreq *request;
	struct nic *nic;
	const char *delay;
	va_list rest;

	va_start(rest, what);
	request = va_arg(rest, void *);
	va_end(rest);
	if (what != SIOCETHTOOL) {
		if (!next)
			next = dlsym(RTLD_NEXT, "ioctl");
		return next(fd, what, request);
	}
	written(request);
	delay = getenv("ETHTOOL_DELAY_US");
	if (delay)
		usleep(atoi(delay));
	nic = find(request->ifr_name);
	errno = nic ? answer(nic, request->ifr_data) : ENODEV;
	return errno ? -1 : 0;
}
