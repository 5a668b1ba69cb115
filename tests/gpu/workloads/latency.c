// Owns the cost loop: latency of allocation pairs and of a bare system call, one JSON line.
// Refuses any tracing of its own: what it measures is the difference that others make.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAIRS = 4000, ASYNC_BATCHES = 2000, BATCH = 20, CALLS = 2000000 };
static double laps[PAIRS];

static double nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static int by_size(const void *left, const void *right)
{
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

static void say(const char *name, int count)
{
    double sum = 0;
    for (int at = 0; at < count; at++) sum += laps[at];
    qsort(laps, count, sizeof *laps, by_size);
    printf("\"%s\":{\"p50_ns\":%.0f,\"p99_ns\":%.0f,\"mean_ns\":%.0f}", name, laps[count / 2], laps[count * 99 / 100], sum / count);
}

int main(void)
{
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUdeviceptr at;
    if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) return 1;
    cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    for (int warm = 0; warm < 200; warm++) {
        cuMemAlloc(&at, 2 << 20);
        cuMemFree(at);
        cuMemAllocAsync(&at, 2 << 20, stream);
        cuMemFreeAsync(at, stream);
    }
    cuStreamSynchronize(stream);
    for (int pair = 0; pair < PAIRS; pair++) {
        double begun = nanoseconds();
        if (cuMemAlloc(&at, 2 << 20) || cuMemFree(at)) return 1;
        laps[pair] = nanoseconds() - begun;
    }
    printf("{");
    say("alloc_free", PAIRS);
    for (int batch = 0; batch < ASYNC_BATCHES; batch++) {
        double begun = nanoseconds();
        for (int pair = 0; pair < BATCH; pair++)
            if (cuMemAllocAsync(&at, 2 << 20, stream) || cuMemFreeAsync(at, stream)) return 1;
        laps[batch] = (nanoseconds() - begun) / BATCH;
    }
    cuStreamSynchronize(stream);
    printf(",");
    say("alloc_free_async", ASYNC_BATCHES);
    double begun = nanoseconds();
    for (int call = 0; call < CALLS; call++) syscall(SYS_getppid);
    printf(",\"getppid\":{\"mean_ns\":%.1f}}\n", (nanoseconds() - begun) / CALLS);
    return 0;
}
