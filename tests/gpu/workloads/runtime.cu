// Owns the runtime-API workload, with the runtime linked statically: tallied as the driver calls it must become.
// Refuses managed memory beyond a few MiB.
#include <cuda_runtime.h>
#include <cstdlib>

#include "tally.h"

static const long long MIB = 1 << 20;

__global__ void touch(char *at) { at[threadIdx.x] = 1; }

int main()
{
    char *kept[10], *at;
    for (int i = 0; i < 10; i++)
        if (!called("cuMemAlloc", cudaMalloc((void **)&kept[i], 5 * MIB + 1000 * i))) held(DEVICE, 5 * MIB + 1000 * i);
    for (int i = 0; i < 10; i += 3)
        if (!called("cuMemFree", cudaFree(kept[i]))) held(DEVICE, -(5 * MIB + 1000 * i));
    size_t pitch;
    if (!called("cuMemAllocPitch", cudaMallocPitch((void **)&at, &pitch, 3000, 700))) held(DEVICE, pitch * 700);

    cudaStream_t stream;
    cudaStreamCreate(&stream);
    char *pooled[4];
    for (int i = 0; i < 4; i++)
        if (!called("cuMemAllocAsync", cudaMallocAsync((void **)&pooled[i], 6 * MIB, stream))) held(POOL, 6 * MIB);
    touch<<<1, 32, 0, stream>>>(pooled[0]);
    if (!called("cuMemFreeAsync", cudaFreeAsync(pooled[3], stream))) held(POOL, -6 * MIB);
    cudaStreamSynchronize(stream);

    cudaArray_t flat, cube;
    cudaChannelFormatDesc word = cudaCreateChannelDesc<float>();
    if (!called("array", cudaMallocArray(&flat, &word, 2048, 256))) held(ARRAY, 2048ll * 256 * 4);
    if (!called("array", cudaMalloc3DArray(&cube, &word, make_cudaExtent(32, 32, 32)))) held(ARRAY, 32ll * 32 * 32 * 4);

    void *pinned, *mapped, *own = aligned_alloc(4096, MIB);
    if (!called("cuMemAllocManaged", cudaMallocManaged((void **)&at, 8 * MIB))) held(MANAGED, 8 * MIB);
    if (!called("cuMemHostAlloc", cudaMallocHost(&pinned, 2 * MIB))) held(HOST_PINNED, 2 * MIB);
    if (!called("cuMemHostAlloc", cudaHostAlloc(&mapped, 3 * MIB, cudaHostAllocMapped))) held(HOST_PINNED, 3 * MIB);
    if (!called("cuMemHostRegister", cudaHostRegister(own, MIB, 0))) held(HOST_REGISTERED, MIB);

    called("cuMemAlloc", cudaMalloc((void **)&at, (size_t)400 << 30));
    called("cuMemFree", cudaFree((void *)0xdead0000));
    phase(1);
    if (!called("cuMemFree", cudaFree(kept[1]))) held(DEVICE, -(5 * MIB + 1000));
    phase(2);
    return 0;
}
