// Owns the context-switch loop: a byte to and fro between two processes, nanoseconds a switch, one JSON line.
// Refuses CUDA: with the agent on, what it measures is the scheduler hooks alone.
//
//   switch FIRST_CORE SECOND_CORE ROUNDS      cores of -1: wherever the scheduler puts them
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static void pin(int core)
{
    cpu_set_t set;
    if (core < 0) return;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof set, &set)) _exit(3);
}

int main(int count, char **arguments)
{
    int there[2], back[2], rounds = count > 3 ? atoi(arguments[3]) : 0;
    char byte = 0;
    if (rounds < 1 || pipe(there) || pipe(back)) return 2;
    if (fork() == 0) {
        pin(atoi(arguments[2]));
        close(there[1]);
        while (read(there[0], &byte, 1) == 1)
            if (write(back[1], &byte, 1) != 1) break;
        _exit(0);
    }
    pin(atoi(arguments[1]));
    double begun = 0;
    for (int round = -rounds / 10; round < rounds; round++) {
        if (round == 0) begun = nanoseconds();
        if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1) return 1;
    }
    double took = nanoseconds() - begun;
    close(there[1]);
    wait(NULL);
    printf("{\"switches\":%d,\"ns_per_switch\":%.1f}\n", 2 * rounds, took / rounds / 2);
    return 0;
}
