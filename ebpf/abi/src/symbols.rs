//! Owns the table of probed `libcuda.so` exports: one row a symbol, as data.
//! Refuses a missing symbol as an error: drivers differ, absent rows are reported and skipped.
//!
//! Argument positions follow `cuda.h` of CUDA 13.0 (driver API); the `_v2` layouts are unchanged since CUDA 3.2,
//! VMM since 10.2, stream-ordered allocation since 11.2. Twins that share an address are attached once.

use crate::{Action, ByteRule, Cookie, MemoryKind, Operation};

/// One exported function and what its arguments mean.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    pub name: &'static str,
    pub operation: Operation,
    pub cookie: Cookie,
}

const fn count(name: &'static str, operation: Operation) -> Symbol {
    Symbol {
        name,
        operation,
        cookie: Cookie::pack(operation, Action::Count, None, ByteRule::None, 0, 0, false),
    }
}

const fn allocate(
    name: &'static str,
    operation: Operation,
    kind: MemoryKind,
    rule: ByteRule,
    size: u8,
) -> Symbol {
    Symbol {
        name,
        operation,
        cookie: Cookie::pack(operation, Action::Allocate, Some(kind), rule, size, 0, false),
    }
}

const fn free(name: &'static str, operation: Operation) -> Symbol {
    Symbol {
        name,
        operation,
        cookie: Cookie::pack(operation, Action::Free, None, ByteRule::None, 0, 0, false),
    }
}

const fn register(name: &'static str) -> Symbol {
    let (operation, kind) = (Operation::MemHostRegister, MemoryKind::HostRegistered);
    // The pointer is given by value, so it is "narrow": not read through argument 0.
    Symbol {
        name,
        operation,
        cookie: Cookie::pack(operation, Action::Allocate, Some(kind), ByteRule::Argument, 1, 0, true),
    }
}

const fn version1(name: &'static str, operation: Operation, kind: MemoryKind) -> Symbol {
    Symbol {
        name,
        operation,
        cookie: Cookie::pack(operation, Action::Allocate, Some(kind), ByteRule::Argument32, 1, 0, false),
    }
}

const fn handle(name: &'static str, operation: Operation, action: Action, out: u8) -> Symbol {
    let kind = match action {
        Action::HandleImport => MemoryKind::Imported,
        _ => MemoryKind::Vmm,
    };
    Symbol {
        name,
        operation,
        cookie: Cookie::pack(operation, action, Some(kind), ByteRule::Argument, 1, out, false),
    }
}

/// `size` is the argument that holds the device ordinal.
const fn context(name: &'static str, operation: Operation, action: Action, device: u8, out: u8) -> Symbol {
    Symbol {
        name,
        operation,
        cookie: Cookie::pack(operation, action, None, ByteRule::None, device, out, false),
    }
}

use MemoryKind::{Array, Device, HostPinned, Imported, Managed, Pool};

/// Every probed export. Allocating calls first: they are attached first.
pub static SYMBOLS: &[Symbol] = &[
    allocate("cuMemAlloc_v2", Operation::MemAlloc, Device, ByteRule::Argument, 1),
    allocate("cuMemAllocAsync", Operation::MemAllocAsync, Pool, ByteRule::Argument, 1),
    allocate("cuMemAllocAsync_ptsz", Operation::MemAllocAsync, Pool, ByteRule::Argument, 1),
    allocate("cuMemAllocFromPoolAsync", Operation::MemAllocFromPoolAsync, Pool, ByteRule::Argument, 1),
    allocate("cuMemAllocFromPoolAsync_ptsz", Operation::MemAllocFromPoolAsync, Pool, ByteRule::Argument, 1),
    handle("cuMemCreate", Operation::MemCreate, Action::HandleCreate, 0),
    allocate("cuMemAllocPitch_v2", Operation::MemAllocPitch, Device, ByteRule::Pitch, 0),
    allocate("cuMemAllocManaged", Operation::MemAllocManaged, Managed, ByteRule::Argument, 1),
    allocate("cuMemHostAlloc", Operation::MemHostAlloc, HostPinned, ByteRule::Argument, 1),
    allocate("cuMemAllocHost_v2", Operation::MemAllocHost, HostPinned, ByteRule::Argument, 1),
    free("cuMemFree_v2", Operation::MemFree),
    free("cuMemFreeAsync", Operation::MemFreeAsync),
    free("cuMemFreeAsync_ptsz", Operation::MemFreeAsync),
    handle("cuMemRelease", Operation::MemRelease, Action::HandleRelease, 0),
    handle("cuMemMap", Operation::MemMap, Action::Map, 0),
    handle("cuMemUnmap", Operation::MemUnmap, Action::Unmap, 0),
    handle("cuMemRetainAllocationHandle", Operation::MemRetainAllocationHandle, Action::HandleRetain, 0),
    handle(
        "cuMemImportFromShareableHandle",
        Operation::MemImportFromShareableHandle,
        Action::HandleImport,
        0,
    ),
    free("cuMemFreeHost", Operation::MemFreeHost),
    count("cuInit", Operation::Init),
    context("cuDevicePrimaryCtxRetain", Operation::PrimaryCtxRetain, Action::PrimaryRetain, 1, 0),
    context("cuDevicePrimaryCtxRelease_v2", Operation::PrimaryCtxRelease, Action::PrimaryRelease, 0, 0),
    context("cuDevicePrimaryCtxRelease", Operation::PrimaryCtxRelease, Action::PrimaryRelease, 0, 0),
    context("cuDevicePrimaryCtxReset_v2", Operation::PrimaryCtxReset, Action::PrimaryReset, 0, 0),
    context("cuDevicePrimaryCtxReset", Operation::PrimaryCtxReset, Action::PrimaryReset, 0, 0),
    context("cuCtxCreate", Operation::CtxCreate, Action::ContextCreate, 2, 0),
    context("cuCtxCreate_v2", Operation::CtxCreate, Action::ContextCreate, 2, 0),
    context("cuCtxCreate_v3", Operation::CtxCreate, Action::ContextCreate, 4, 0),
    context("cuCtxCreate_v4", Operation::CtxCreate, Action::ContextCreate, 3, 0),
    context("cuCtxDestroy_v2", Operation::CtxDestroy, Action::ContextDestroy, 0, 0),
    context("cuCtxDestroy", Operation::CtxDestroy, Action::ContextDestroy, 0, 0),
    context("cuCtxSetCurrent", Operation::CtxSetCurrent, Action::ContextSet, 0, 0),
    context("cuCtxPushCurrent_v2", Operation::CtxPushCurrent, Action::ContextPush, 0, 0),
    context("cuCtxPushCurrent", Operation::CtxPushCurrent, Action::ContextPush, 0, 0),
    context("cuCtxPopCurrent_v2", Operation::CtxPopCurrent, Action::ContextPop, 0, 0),
    context("cuCtxPopCurrent", Operation::CtxPopCurrent, Action::ContextPop, 0, 0),
    context("cuDeviceGetUuid_v2", Operation::DeviceGetUuid, Action::DeviceUuid, 1, 0),
    context("cuDeviceGetUuid", Operation::DeviceGetUuid, Action::DeviceUuid, 1, 0),
    allocate("cuArrayCreate_v2", Operation::ArrayCreate, Array, ByteRule::Array2D, 1),
    allocate("cuArray3DCreate_v2", Operation::Array3DCreate, Array, ByteRule::Array3D, 1),
    allocate("cuMipmappedArrayCreate", Operation::MipmappedArrayCreate, Array, ByteRule::Mipmapped, 1),
    free("cuArrayDestroy", Operation::ArrayDestroy),
    free("cuMipmappedArrayDestroy", Operation::MipmappedArrayDestroy),
    register("cuMemHostRegister_v2"),
    register("cuMemHostRegister"),
    free("cuMemHostUnregister", Operation::MemHostUnregister),
    allocate("cuIpcOpenMemHandle_v2", Operation::IpcOpenMemHandle, Imported, ByteRule::Mapped, 0),
    allocate("cuIpcOpenMemHandle", Operation::IpcOpenMemHandle, Imported, ByteRule::Mapped, 0),
    free("cuIpcCloseMemHandle", Operation::IpcCloseMemHandle),
    allocate("cuMemPoolImportPointer", Operation::MemPoolImportPointer, Imported, ByteRule::Mapped, 0),
    version1("cuMemAlloc", Operation::MemAlloc, Device),
    version1("cuMemAllocHost", Operation::MemAllocHost, HostPinned),
    free("cuMemFree", Operation::MemFree),
    count("cuMemPoolCreate", Operation::MemPoolCreate),
    count("cuMemPoolDestroy", Operation::MemPoolDestroy),
    count("cuMemPoolTrimTo", Operation::MemPoolTrimTo),
    count("cuMemPoolSetAttribute", Operation::MemPoolSetAttribute),
    count("cuMemAddressReserve", Operation::MemAddressReserve),
    count("cuMemAddressFree", Operation::MemAddressFree),
    count("cuMemSetAccess", Operation::MemSetAccess),
    count("cuMemExportToShareableHandle", Operation::MemExportToShareableHandle),
    count("cuIpcGetMemHandle", Operation::IpcGetMemHandle),
];
