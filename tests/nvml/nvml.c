/* A stand-in for NVIDIA's management library: libnvidia-ml.so.1, as far as diagnosd asks it, built against NVIDIA's own
 * nvml.h, so that a prototype or a struct that is not theirs does not compile.
 *
 * What it answers stands in the text file $NVML_STATE, read again whenever it has been replaced (write another, rename):
 *
 *     nvmlDeviceGetCount_v2 = 8
 *     0.nvmlDeviceGetUtilizationRates = 97,40         GPU . function [. argument ...] = answer
 *     0.nvmlDeviceGetClockInfo.1 = 1980
 *     0.field.138.4294967295 = 1000 + 50/s            field . id . scope; a counter that runs since the file was written
 *     0.field.197.0 = uint 7                          its type, where it is not unsigned long long
 *     0.gpm.5 = 61.5                                  a metric of GPM
 *     3.* = error 15                                  a pattern beats every other line, the last one first
 *     *.nvmlDeviceGetPowerUsage = hang                for ever; only SIGKILL ends it, as in an ioctl that does not return
 *     *.nvmlDeviceGetPowerUsage = slow 0.3            answers as it would, that many seconds later
 *
 * What has no line is not supported. $NVML_TRACE names a file that gets a line for each question.
 */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 16384 /* a power of two, some times the lines of 8 GPUs with 18 links */
#define PATTERNS 64

typedef struct {
    char key[72];
    char text[128];
} Line;

static Line lines[SLOTS], patterns[PATTERNS];
static int pattern_count, started;
static struct stat seen;

/* ---- the file of answers ---- */

static Line *slot(const char *key) {
    unsigned hash = 2166136261u;
    for (const char *c = key; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    Line *line = &lines[hash % SLOTS];
    while (line->key[0] && strcmp(line->key, key)) line = line == &lines[SLOTS - 1] ? lines : line + 1;
    return line;
}

static void keep(char *text) {
    char *answer = strstr(text, " = ");
    if (text[0] == '#' || !answer) return;
    *answer = 0;
    answer += 3;
    answer[strcspn(answer, "\n")] = 0;
    Line *line = strchr(text, '*') ? (pattern_count < PATTERNS ? &patterns[pattern_count++] : NULL) : slot(text);
    if (!line) return;
    snprintf(line->key, sizeof line->key, "%.71s", text);
    snprintf(line->text, sizeof line->text, "%.127s", answer);
}

static void look(void) {
    const char *path = getenv("NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (now.st_ino == seen.st_ino && !memcmp(&now.st_mtim, &seen.st_mtim, sizeof now.st_mtim)) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    seen = now;
    pattern_count = 0;
    memset(lines, 0, sizeof lines);
    for (char text[256]; fgets(text, sizeof text, file);) keep(text);
    fclose(file);
}

static void note(const char *key) {
    const char *path = getenv("NVML_TRACE");
    int trace = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (trace < 0) return;
    dprintf(trace, "%s\n", key);
    close(trace);
}

/* The answer to a question, or an error: what a pattern says comes first. */
static nvmlReturn_t find(const char *key, const char **answer) {
    note(key);
    const Line *line = slot(key);
    *answer = line->key[0] ? line->text : NULL;
    for (int i = pattern_count - 1; i >= 0; i--)
        if (!fnmatch(patterns[i].key, key, 0)) {
            double seconds;
            if (sscanf(patterns[i].text, "slow %lf", &seconds) == 1) {
                struct timespec pause = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
                nanosleep(&pause, NULL);
                continue;
            }
            *answer = patterns[i].text;
            break;
        }
    int code;
    if (!*answer) return NVML_ERROR_NOT_SUPPORTED;
    while (!strcmp(*answer, "hang")) pause();
    return sscanf(*answer, "error %d", &code) == 1 ? (nvmlReturn_t)code : NVML_SUCCESS;
}

static nvmlReturn_t ask(const char **answer, const char *format, ...) {
    char key[72];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(key, sizeof key, format, arguments);
    va_end(arguments);
    if (!started) return NVML_ERROR_UNINITIALIZED;
    look();
    return find(key, answer);
}

/* ---- answers as numbers and text ---- */

#define INDEX(gpu) ((int)(long)(gpu) - 1)
#define TRY(call) do { nvmlReturn_t code_ = (call); if (code_) return code_; } while (0)

static double elapsed(void) { /* since the file was written */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec - seen.st_mtim.tv_sec + (now.tv_nsec - seen.st_mtim.tv_nsec) / 1e9;
}

static unsigned long long whole(const char *text) {
    double rate;
    char *rest;
    unsigned long long value = strtoull(text, &rest, 0);
    return sscanf(rest, " + %lf/s", &rate) == 1 ? value + (unsigned long long)(rate * elapsed()) : value;
}

static nvmlReturn_t texted(char *to, unsigned room, const char *answer) {
    if (strlen(answer) >= room) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, answer);
    return NVML_SUCCESS;
}

/* Getters of one number: their name, the type of the number, and what stands before it in the call. */
#define NUMBER(type, to, ...) do { const char *a; TRY(ask(&a, __VA_ARGS__)); *(to) = (type)whole(a); return NVML_SUCCESS; } while (0)
#define PLAIN(name, type) nvmlReturn_t name(nvmlDevice_t gpu, type *to) { NUMBER(type, to, "%d." #name, INDEX(gpu)); }
#define WITH(name, argument, type) \
    nvmlReturn_t name(nvmlDevice_t gpu, argument one, type *to) { NUMBER(type, to, "%d." #name ".%d", INDEX(gpu), (int)one); }
#define TEXT(name) \
    nvmlReturn_t name(nvmlDevice_t gpu, char *to, unsigned room) { \
        const char *a; TRY(ask(&a, "%d." #name, INDEX(gpu))); return texted(to, room, a); }
#define SYSTEM(name) \
    nvmlReturn_t name(char *to, unsigned room) { const char *a; TRY(ask(&a, #name)); return texted(to, room, a); }

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

PLAIN(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long)
PLAIN(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long)
PLAIN(nvmlDeviceGetCurrPcieLinkGeneration, unsigned)
PLAIN(nvmlDeviceGetCurrPcieLinkWidth, unsigned)
PLAIN(nvmlDeviceGetMaxPcieLinkGeneration, unsigned)
PLAIN(nvmlDeviceGetMaxPcieLinkWidth, unsigned)
PLAIN(nvmlDeviceGetPcieReplayCounter, unsigned)
PLAIN(nvmlDeviceGetPowerUsage, unsigned)
PLAIN(nvmlDeviceGetEnforcedPowerLimit, unsigned)
PLAIN(nvmlDeviceGetPowerManagementDefaultLimit, unsigned)
PLAIN(nvmlDeviceGetPersistenceMode, nvmlEnableState_t)
WITH(nvmlDeviceGetClockInfo, nvmlClockType_t, unsigned)
WITH(nvmlDeviceGetTemperature, nvmlTemperatureSensors_t, unsigned)
WITH(nvmlDeviceGetNvLinkState, unsigned, nvmlEnableState_t)
WITH(nvmlDeviceGetNvLinkRemoteDeviceType, unsigned, nvmlIntNvLinkDeviceType_t)
TEXT(nvmlDeviceGetName)
TEXT(nvmlDeviceGetUUID)
TEXT(nvmlDeviceGetSerial)
TEXT(nvmlDeviceGetVbiosVersion)
SYSTEM(nvmlSystemGetDriverVersion)

nvmlReturn_t nvmlSystemGetNVMLVersion(char *to, unsigned room) { /* also before nvmlInit */
    const char *a;
    look();
    TRY(find("nvmlSystemGetNVMLVersion", &a));
    return texted(to, room, a);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *to) { NUMBER(int, to, "nvmlSystemGetCudaDriverVersion_v2"); }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *to) { NUMBER(unsigned, to, "nvmlDeviceGetCount_v2"); }
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t gpu, unsigned *to) { *to = INDEX(gpu); return NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(
    nvmlDevice_t gpu, unsigned link, nvmlNvLinkErrorCounter_t kind, unsigned long long *to) {
    NUMBER(unsigned long long, to, "%d.nvmlDeviceGetNvLinkErrorCounter.%u.%d", INDEX(gpu), link, (int)kind);
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t gpu, nvmlMemoryErrorType_t type, nvmlEccCounterType_t since,
                                             nvmlMemoryLocation_t where, unsigned long long *to) {
    const char *form = "%d.nvmlDeviceGetMemoryErrorCounter.%d.%d.%d";
    NUMBER(unsigned long long, to, form, INDEX(gpu), (int)type, (int)since, (int)where);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t gpu, nvmlTemperature_t *to) {
    if (to->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    NUMBER(int, &to->temperature, "%d.nvmlDeviceGetTemperatureV.%d", INDEX(gpu), (int)to->sensorType);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, nvmlUtilization_t *to) {
    const char *a;
    TRY(ask(&a, "%d.nvmlDeviceGetUtilizationRates", INDEX(gpu)));
    sscanf(a, "%u,%u", &to->gpu, &to->memory);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t gpu, unsigned *now, unsigned *next) {
    const char *a;
    TRY(ask(&a, "%d.nvmlDeviceGetMigMode", INDEX(gpu)));
    sscanf(a, "%u,%u", now, next);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t gpu, nvmlMemory_t *to) { /* reserved is a part of used here */
    const char *a;
    TRY(ask(&a, "%d.nvmlDeviceGetMemoryInfo", INDEX(gpu)));
    sscanf(a, "%llu,%llu,%llu", &to->total, &to->free, &to->used);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, nvmlMemory_v2_t *to) {
    const char *a;
    if (to->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(ask(&a, "%d.nvmlDeviceGetMemoryInfo_v2", INDEX(gpu)));
    sscanf(a, "%llu,%llu,%llu,%llu", &to->total, &to->reserved, &to->free, &to->used);
    return NVML_SUCCESS;
}

/* state, status, clique, health mask, health summary, uuid in hex; an old driver knows the second version only */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t gpu, nvmlGpuFabricInfoV_t *to) {
    const char *a;
    char uuid[33] = "";
    unsigned state, status, clique, mask, summary, byte;
    int third = to->version == nvmlGpuFabricInfo_v3;
    if (!third && to->version != nvmlGpuFabricInfo_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(ask(&a, "%d.nvmlDeviceGetGpuFabricInfoV.%d", INDEX(gpu), third ? 3 : 2));
    if (sscanf(a, "%u,%u,%u,%u,%u,%32s", &state, &status, &clique, &mask, &summary, uuid) < 5) return NVML_ERROR_UNKNOWN;
    to->state = state, to->status = status, to->cliqueId = clique, to->healthMask = mask;
    if (third) ((nvmlGpuFabricInfo_v3_t *)to)->healthSummary = summary;
    for (int i = 0; i < NVML_GPU_FABRIC_UUID_LEN && sscanf(uuid + 2 * i, "%2x", &byte) == 1; i++) to->clusterUuid[i] = byte;
    return NVML_SUCCESS;
}

/* ---- PCI addresses and handles ---- */

static void addressed(nvmlPciInfo_t *to, const char *answer) {
    memset(to, 0, sizeof *to);
    snprintf(to->busId, sizeof to->busId, "%.31s", answer);
    sscanf(answer, "%x:%x:%x", &to->domain, &to->bus, &to->device);
    snprintf(to->busIdLegacy, sizeof to->busIdLegacy, "%04X:%02X:%02X.0", to->domain & 0xFFFF, to->bus & 0xFF, to->device & 0x1F);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t gpu, nvmlPciInfo_t *to) {
    const char *a;
    TRY(ask(&a, "%d.nvmlDeviceGetPciInfo_v3", INDEX(gpu)));
    addressed(to, a);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t gpu, unsigned link, nvmlPciInfo_t *to) {
    const char *a;
    TRY(ask(&a, "%d.nvmlDeviceGetNvLinkRemotePciInfo_v2.%u", INDEX(gpu), link));
    addressed(to, a);
    return NVML_SUCCESS;
}

static nvmlReturn_t handle(unsigned index, nvmlDevice_t *to) { /* a GPU with an address has a handle, unless a line forbids */
    const char *a;
    nvmlReturn_t code = ask(&a, "%u.handle", index);
    *to = (nvmlDevice_t)(long)(index + 1);
    return code == NVML_ERROR_NOT_SUPPORTED ? NVML_SUCCESS : code;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *to) {
    unsigned count;
    TRY(nvmlDeviceGetCount_v2(&count));
    return index < count ? handle(index, to) : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *to) {
    unsigned count;
    nvmlPciInfo_t wanted;
    addressed(&wanted, address);
    TRY(nvmlDeviceGetCount_v2(&count));
    for (unsigned index = 0; index < count; index++) {
        char key[72];
        snprintf(key, sizeof key, "%u.nvmlDeviceGetPciInfo_v3", index);
        nvmlPciInfo_t here;
        addressed(&here, slot(key)->text);
        if (here.domain == wanted.domain && here.bus == wanted.bus && here.device == wanted.device) return handle(index, to);
    }
    return NVML_ERROR_NOT_FOUND;
}

/* ---- many values in one call ---- */

static void valued(nvmlFieldValue_t *to, const char *answer) {
    static const char *types[] = {"double", "uint", "ulong", "ull", "sll", "sint", "ushort"};
    char word[8];
    int length = 0;
    to->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    to->value.ullVal = 0;
    if (sscanf(answer, "%7[a-z]%n", word, &length) == 1)
        for (unsigned type = 0; type < sizeof types / sizeof *types; type++)
            if (!strcmp(word, types[type])) to->valueType = type, answer += length;
    if (to->valueType == NVML_VALUE_TYPE_DOUBLE) to->value.dVal = strtod(answer, NULL);
    else if (to->valueType == NVML_VALUE_TYPE_UNSIGNED_INT) to->value.uiVal = (unsigned)whole(answer);
    else if (to->valueType == NVML_VALUE_TYPE_SIGNED_INT) to->value.siVal = (int)strtoll(answer, NULL, 0);
    else if (to->valueType == NVML_VALUE_TYPE_SIGNED_LONG_LONG) to->value.sllVal = strtoll(answer, NULL, 0);
    else if (to->valueType == NVML_VALUE_TYPE_UNSIGNED_SHORT) to->value.usVal = (unsigned short)whole(answer);
    else to->value.ullVal = whole(answer);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t gpu, int count, nvmlFieldValue_t *values) {
    const char *a;
    nvmlReturn_t code = ask(&a, "%d.nvmlDeviceGetFieldValues", INDEX(gpu));
    if (code && code != NVML_ERROR_NOT_SUPPORTED) return code;
    for (nvmlFieldValue_t *value = values; value < values + count; value++) {
        char key[72];
        snprintf(key, sizeof key, "%d.field.%u.%u", INDEX(gpu), value->fieldId, value->scopeId);
        value->nvmlReturn = find(key, &a);
        if (!value->nvmlReturn) valued(value, a);
    }
    return NVML_SUCCESS;
}

/* ---- GPM: a sample knows whose it is, the metrics are what the file says when they are asked for ---- */

struct nvmlGpmSample_st { int index; };

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t gpu, nvmlGpmSupport_t *to) {
    if (to->version != NVML_GPM_SUPPORT_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    NUMBER(unsigned, &to->isSupportedDevice, "%d.nvmlGpmQueryDeviceSupport", INDEX(gpu));
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *to) {
    note("nvmlGpmSampleAlloc");
    return (*to = calloc(1, sizeof **to)) ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    note("nvmlGpmSampleFree");
    free(sample);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t gpu, nvmlGpmSample_t sample) {
    const char *a;
    nvmlReturn_t code = ask(&a, "%d.nvmlGpmSampleGet", INDEX(gpu));
    sample->index = INDEX(gpu);
    return code == NVML_ERROR_NOT_SUPPORTED ? NVML_SUCCESS : code;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *to) {
    const char *a;
    if (to->version != NVML_GPM_METRICS_GET_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (to->sample1 == to->sample2 || to->sample1->index != to->sample2->index) return NVML_ERROR_INVALID_ARGUMENT;
    for (nvmlGpmMetric_t *metric = to->metrics; metric < to->metrics + to->numMetrics; metric++) {
        metric->nvmlReturn = ask(&a, "%d.gpm.%u", to->sample2->index, metric->metricId);
        if (!metric->nvmlReturn) metric->value = strtod(a, NULL);
    }
    return NVML_SUCCESS;
}

/* ---- beginning and end ---- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    const char *a;
    (void)flags;
    look();
    nvmlReturn_t code = find("nvmlInitWithFlags", &a);
    if (code && code != NVML_ERROR_NOT_SUPPORTED) return code;
    started++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) {
    note("nvmlShutdown");
    if (!started) return NVML_ERROR_UNINITIALIZED;
    started--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    return code == NVML_SUCCESS ? "Success" : "The stand-in says no";
}
