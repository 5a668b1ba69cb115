// Owns the loops that make and suffer contention: allocate and free for a while, time each pair, one JSON line a run.
// Refuses managed memory and any idea of who is to blame: it knows its own times only.
//
//   contend loop DEVICE BYTES THREADS PAUSE_US      then on stdin: `run SECONDS SLOWEST`, any number of times
//   contend eat DEVICE BYTES [1 PAUSE_US]           then on stdin: `run`: eats host memory until it is killed
//   contend eat-at-once                             the same without CUDA and without waiting to be told
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 16, MOST_PAIRS = 1 << 19 };
struct pair { long long at, took; };
struct lap { pthread_t thread; struct pair *pairs; long long count, alloc, free; int failed; int tid; };

static CUcontext context;
static size_t bytes;
static long long until;
static int pause_us;
static struct lap laps[MOST_THREADS];

static long long now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000ll + at.tv_nsec;
}

static void *loop(void *argument)
{
    struct lap *lap = argument;
    CUdeviceptr at;
    lap->tid = syscall(SYS_gettid);
    cuCtxSetCurrent(context);
    while (now() < until && lap->count < MOST_PAIRS) {
        long long begun = now(), between, ended;
        if (cuMemAlloc(&at, bytes)) { lap->failed++; usleep(1000); continue; }
        between = now();
        if (cuMemFree(at)) lap->failed++;
        ended = now();
        lap->pairs[lap->count++] = (struct pair){begun, ended - begun};
        lap->alloc += between - begun;
        lap->free += ended - between;
        if (pause_us) usleep(pause_us);
    }
    return NULL;
}

static int longest_first(const void *left, const void *right)
{
    long long difference = ((const struct pair *)right)->took - ((const struct pair *)left)->took;
    return (difference > 0) - (difference < 0);
}

static void run(int threads, double seconds, int slowest)
{
    long long count = 0, sum = 0, alloc = 0, free = 0, failed = 0, begun = now();
    until = begun + (long long)(seconds * 1e9);
    for (int each = 0; each < threads; each++) {
        laps[each].count = laps[each].alloc = laps[each].free = laps[each].failed = 0;
        if (each) pthread_create(&laps[each].thread, NULL, loop, &laps[each]);
    }
    /* The first is the main thread: whoever watches it knows its id beforehand. */
    loop(&laps[0]);
    for (int each = 1; each < threads; each++) pthread_join(laps[each].thread, NULL);
    long long ended = now();
    static struct pair all[MOST_PAIRS * 4];
    for (int each = 0; each < threads; each++)
        for (long long pair = 0; pair < laps[each].count && count < MOST_PAIRS * 4; pair++) {
            sum += laps[each].pairs[pair].took;
            all[count++] = laps[each].pairs[pair];
        }
    qsort(all, count, sizeof *all, longest_first);
    printf("{\"begun_ns\":%lld,\"ended_ns\":%lld,\"tids\":[", begun, ended);
    for (int each = 0; each < threads; each++) {
        printf("%s%d", each ? "," : "", laps[each].tid);
        alloc += laps[each].alloc, free += laps[each].free, failed += laps[each].failed;
    }
    printf("],\"count\":%lld,\"sum_ns\":%lld,\"alloc_ns\":%lld,\"free_ns\":%lld,\"failed\":%lld", count, sum, alloc, free, failed);
    if (count)
        printf(",\"p50_ns\":%lld,\"p99_ns\":%lld,\"max_ns\":%lld", all[count / 2].took, all[count / 100].took, all[0].took);
    printf(",\"slowest\":[");
    for (int each = 0; each < slowest && each < count; each++) printf("%s[%lld,%lld]", each ? "," : "", all[each].at, all[each].took);
    printf("]}\n");
    fflush(stdout);
}

static void eat(void)
{
    for (;;) {
        memset(malloc(16 << 20), 1, 16 << 20);
        if (pause_us) usleep(pause_us);
    }
}

int main(int count, char **arguments)
{
    CUdevice device;
    char line[64];
    double seconds;
    int slowest, threads = count > 4 ? atoi(arguments[4]) : 1;
    if (count > 1 && !strcmp(arguments[1], "eat-at-once")) eat();
    if (count < 4 || threads < 1 || threads > MOST_THREADS) return 2;
    bytes = atoll(arguments[3]);
    pause_us = count > 5 ? atoi(arguments[5]) : 0;
    long long begun = now();
    if (cuInit(0) || cuDeviceGet(&device, atoi(arguments[2]))) return 1;
    long long initialised = now();
    if (cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) return 1;
    long long ready = now();
    for (int each = 0; each < threads; each++) {
        laps[each].pairs = malloc(MOST_PAIRS * sizeof(struct pair));
        memset(laps[each].pairs, 0, MOST_PAIRS * sizeof(struct pair));
    }
    CUdeviceptr kept;
    if (!strcmp(arguments[1], "eat") && cuMemAlloc(&kept, bytes)) return 1;
    printf("{\"pid\":%d,\"init_ns\":%lld,\"context_ns\":%lld}\n", getpid(), initialised - begun, ready - initialised);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (!strcmp(arguments[1], "eat")) eat();
        if (sscanf(line, "run %lf %d", &seconds, &slowest) == 2) run(threads, seconds, slowest);
    }
    return 0;
}
