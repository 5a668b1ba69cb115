// Owns the driver-API workload: every allocating family, implicit frees, deliberate failures, all tallied.
// Refuses managed memory beyond a few MiB.
#include <cuda.h>
#include <stdlib.h>

#include "tally.h"

#define MIB (1ll << 20)
#define TOO_MUCH ((size_t)400 << 30)

static CUdevice device;

static void start(void)
{
    CUcontext primary;
    if (called("cuInit", cuInit(0))) exit(1);
    cuDeviceGet(&device, 0);
    if (called("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&primary, device))) exit(1);
    called("cuCtxSetCurrent", cuCtxSetCurrent(primary));
}

static CUdeviceptr take(size_t bytes)
{
    CUdeviceptr at = 0;
    if (!called("cuMemAlloc", cuMemAlloc(&at, bytes))) held(DEVICE, bytes);
    return at;
}

static void give(CUdeviceptr at, size_t bytes)
{
    if (!called("cuMemFree", cuMemFree(at))) held(DEVICE, -(long long)bytes);
}

static void linear(void)
{
    enum { COUNT = 16 };
    CUdeviceptr at[COUNT];
    for (int i = 0; i < COUNT; i++) at[i] = take(3 * MIB * (i + 1) + 12345);
    for (int i = 0; i < COUNT; i += 2) give(at[i], 3 * MIB * (i + 1) + 12345);
    /* 200 of one size, all freed: addresses come back. */
    for (int i = 0; i < 200; i++) give(take(2 * MIB), 2 * MIB);
    size_t pitch;
    CUdeviceptr rows2d;
    if (!called("cuMemAllocPitch", cuMemAllocPitch(&rows2d, &pitch, 4000, 1000, 4))) held(DEVICE, pitch * 1000);
}

static void arrays(void)
{
    CUarray one, two, gone;
    CUmipmappedArray mips;
    CUDA_ARRAY_DESCRIPTOR flat = {1024, 512, CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY3D_DESCRIPTOR cube = {64, 64, 64, CU_AD_FORMAT_HALF, 2, 0};
    CUDA_ARRAY3D_DESCRIPTOR base = {256, 256, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4, 0};
    if (!called("cuArrayCreate", cuArrayCreate(&one, &flat))) held(ARRAY, 1024ll * 512 * 16);
    if (!called("cuArray3DCreate", cuArray3DCreate(&two, &cube))) held(ARRAY, 64ll * 64 * 64 * 4);
    if (!called("cuMipmappedArrayCreate", cuMipmappedArrayCreate(&mips, &base, 5)))
        held(ARRAY, 4 * (256ll * 256 + 128 * 128 + 64 * 64 + 32 * 32 + 16 * 16));
    if (!called("cuArrayCreate", cuArrayCreate(&gone, &flat))) {
        held(ARRAY, 1024ll * 512 * 16);
        if (!called("cuArrayDestroy", cuArrayDestroy(gone))) held(ARRAY, -1024ll * 512 * 16);
    }
}

static void host(void)
{
    CUdeviceptr shared;
    void *pinned, *locked, *own = aligned_alloc(4096, 2 * MIB), *gone;
    if (!called("cuMemAllocManaged", cuMemAllocManaged(&shared, 8 * MIB, CU_MEM_ATTACH_GLOBAL))) held(MANAGED, 8 * MIB);
    if (!called("cuMemHostAlloc", cuMemHostAlloc(&pinned, 5 * MIB, CU_MEMHOSTALLOC_DEVICEMAP))) held(HOST_PINNED, 5 * MIB);
    if (!called("cuMemAllocHost", cuMemAllocHost(&locked, 3 * MIB))) held(HOST_PINNED, 3 * MIB);
    if (!called("cuMemAllocHost", cuMemAllocHost(&gone, 4 * MIB))) held(HOST_PINNED, 4 * MIB);
    if (!called("cuMemFreeHost", cuMemFreeHost(gone))) held(HOST_PINNED, -4 * MIB);
    if (!called("cuMemHostRegister", cuMemHostRegister(own, 2 * MIB, 0))) held(HOST_REGISTERED, 2 * MIB);
}

static void pools(void)
{
    CUstream stream;
    CUmemoryPool pool;
    CUdeviceptr at[3], own;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}}};
    cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < 3; i++)
        if (!called("cuMemAllocAsync", cuMemAllocAsync(&at[i], 7 * MIB, stream))) held(POOL, 7 * MIB);
    if (!called("cuMemFreeAsync", cuMemFreeAsync(at[1], stream))) held(POOL, -7 * MIB);
    called("cuMemPoolCreate", cuMemPoolCreate(&pool, &props));
    if (!called("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync(&own, 9 * MIB, pool, stream))) held(POOL, 9 * MIB);
    called("cuMemAllocAsync", cuMemAllocAsync(&own, TOO_MUCH, stream));
    cuStreamSynchronize(stream);
}

static void physical(void)
{
    enum { COUNT = 6 };
    CUmemGenericAllocationHandle handle[COUNT], spare, much;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}}};
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr base;
    const size_t each = 20 * MIB;
    called("cuMemAddressReserve", cuMemAddressReserve(&base, COUNT * each, 0, 0, 0));
    for (int i = 0; i < COUNT; i++) {
        if (!called("cuMemCreate", cuMemCreate(&handle[i], each, &prop, 0))) held(VMM, each);
        called("cuMemMap", cuMemMap(base + i * each, each, 0, handle[i], 0));
    }
    called("cuMemSetAccess", cuMemSetAccess(base, COUNT * each, &access, 1));
    /* 0 and 1 go at once, by one span; 2 is released and stays mapped; 3 is unmapped and keeps its handle. */
    called("cuMemUnmap", cuMemUnmap(base, 2 * each));
    for (int i = 0; i < 2; i++)
        if (!called("cuMemRelease", cuMemRelease(handle[i]))) held(VMM, -(long long)each);
    called("cuMemRelease", cuMemRelease(handle[2]));
    called("cuMemUnmap", cuMemUnmap(base + 3 * each, each));
    if (!called("cuMemCreate", cuMemCreate(&spare, 2 * MIB, &prop, 0))) held(VMM, 2 * MIB);
    called("cuMemCreate", cuMemCreate(&much, TOO_MUCH, &prop, 0));
}

/* A context that dies takes its memory along without one free. */
static void context(void)
{
    CUcontext second;
    CUdeviceptr at;
    if (called("cuCtxCreate", cuCtxCreate(&second, NULL, 0, device))) return;
    if (!called("cuMemAlloc", cuMemAlloc(&at, 10 * MIB))) held(DEVICE, 10 * MIB);
    if (!called("cuCtxDestroy", cuCtxDestroy(second))) held(DEVICE, -10 * MIB);
}

static void failures(void)
{
    CUdeviceptr at = take(MIB);
    take(TOO_MUCH);
    give(at, MIB);
    called("cuMemFree", cuMemFree(at));
    called("cuMemFree", cuMemFree(0xdead0000));
    called("cuMemFree", cuMemFree(0));
    called("cuMemAlloc", cuMemAlloc(&at, 0));
}

static int late(void)
{
    CUdeviceptr before[3];
    for (int i = 0; i < 3; i++) before[i] = take(50 * MIB);
    phase(1);
    give(before[0], 50 * MIB);
    take(32 * MIB);
    phase(2);
    return 0;
}

/* One stream-ordered allocation, after a refused one or not: what a pool costs beyond its bytes. */
static int pooled(long long bytes, int refused)
{
    CUstream stream;
    CUmemoryPool pool;
    CUdeviceptr at;
    cuuint64_t reserved;
    cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (refused) called("cuMemAllocAsync", cuMemAllocAsync(&at, TOO_MUCH, stream));
    if (!called("cuMemAllocAsync", cuMemAllocAsync(&at, bytes, stream))) held(POOL, bytes);
    cuStreamSynchronize(stream);
    cuDeviceGetDefaultMemPool(&pool, device);
    cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
    pool_reserved = reserved;
    phase(1);
    return 0;
}

int main(int count, char **arguments)
{
    const char *mode = count > 1 ? arguments[1] : "all";
    start();
    if (!strcmp(mode, "late")) return late();
    if (!strcmp(mode, "hold")) {
        take(atoll(arguments[2]) * MIB);
        phase(1);
        return 0;
    }
    if (!strcmp(mode, "pool")) return pooled(atoll(arguments[2]) * MIB, 0);
    if (!strcmp(mode, "refused")) return pooled(atoll(arguments[2]) * MIB, 1);
    linear();
    arrays();
    host();
    pools();
    physical();
    context();
    failures();
    phase(1);
    give(take(64 * MIB), 64 * MIB);
    phase(2);
    return 0;
}
