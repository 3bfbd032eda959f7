"""A launcher whose ranks are processes of multiprocessing, each of which forks once more."""

import multiprocessing
import os
import sys
import time

from diagnosd import probe


def train(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    for number in range(10):
        with probe.step():
            time.sleep(0.01)
        if number == 4:
            child = os.fork()
            if not child:
                with probe.step():  # a worker that imports the script's modules, say
                    time.sleep(0.01)
                os._exit(0)
            os.waitpid(child, 0)


if __name__ == "__main__":
    ways = multiprocessing.get_context(sys.argv[1])
    ranks = [ways.Process(target=train, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
