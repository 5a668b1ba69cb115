// Owns a tenant that faults: it holds memory, and writes where it has none when it is told to (Xid 31, an MMU fault).
// Refuses to be more than its own victim: the driver ends this context, no other.
//
//   fault DEVICE BYTES        then on stdin: `run`
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char *module =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry astray()\n{\n.reg .u64 %at;\nmov.u64 %at, 0x7000dead0000;\nst.global.u32 [%at], 1;\nret;\n}\n";

int main(int count, char **arguments)
{
    CUdevice device;
    CUcontext context;
    CUdeviceptr kept;
    CUmodule loaded;
    CUfunction astray;
    char line[64];
    if (count < 3) return 2;
    if (cuInit(0) || cuDeviceGet(&device, atoi(arguments[1])) || cuDevicePrimaryCtxRetain(&context, device)) return 1;
    if (cuCtxSetCurrent(context) || cuMemAlloc(&kept, atoll(arguments[2]))) return 1;
    if (cuModuleLoadData(&loaded, module) || cuModuleGetFunction(&astray, loaded, "astray")) return 1;
    printf("{\"pid\":%d}\n", getpid());
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) return 0;
    CUresult launched = cuLaunchKernel(astray, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    CUresult ended = cuCtxSynchronize();
    printf("{\"launched\":%d,\"ended\":%d}\n", launched, ended);
    fflush(stdout);
    fgets(line, sizeof line, stdin);
    return 0;
}
