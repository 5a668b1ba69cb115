//! Owns the exported functions: cuda.h's names and signatures over the driver's verbs.
//! Refuses logic: each reads its arguments, calls one verb and writes one result.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cotenant_abi::{MemoryKind, Operation};

use crate::{
    Code, INVALID_VALUE, NOT_FOUND, Outcome,
    call::{CURRENT, Effects, Process, call, initialise, process},
    driver::Driver,
};

#[repr(C)]
pub struct Array2D {
    width: u64,
    height: u64,
    format: u32,
    channels: u32,
}

#[repr(C)]
pub struct Array3D {
    width: u64,
    height: u64,
    depth: u64,
    format: u32,
    channels: u32,
    flags: u32,
}

#[repr(C)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: u32,
    id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle {
    bytes: u64,
    rest: [u8; 56],
}

/// Writes a result through an out pointer, if there is one.
unsafe fn put<T>(out: *mut T, value: T) -> Outcome<()> {
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the API gives a pointer to a `T`.
    unsafe { out.write(value) };
    Ok(())
}

/// An allocating call: one verb, one out pointer.
unsafe fn allocate(
    operation: Operation,
    out: *mut u64,
    bytes: u64,
    verb: impl FnOnce(&Process, &mut Driver, &mut Effects) -> Outcome<u64>,
) -> Code {
    call(operation, bytes, |process, driver, effects| {
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let value = verb(process, driver, effects)?;
        // SAFETY: not null, and given by the caller for this.
        unsafe { put(out, value) }
    })
}

macro_rules! allocations {
    ($($name:ident($operation:ident, $kind:ident $(, $extra:ident: $type:ty)*);)+) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(out: *mut u64, bytes: usize $(, $extra: $type)*) -> Code {
                // The unused arguments make each twin a function of its own.
                $( let _ = std::hint::black_box(&$extra); )*
                std::hint::black_box(stringify!($name));
                let bytes = bytes as u64;
                // SAFETY: `out` is the caller's.
                unsafe {
                    allocate(Operation::$operation, out, bytes, |process, driver, effects| {
                        driver.allocate(process, bytes, MemoryKind::$kind, effects)
                    })
                }
            }
        )+
    };
}

allocations! {
    cuMemAlloc_v2(MemAlloc, Device);
    cuMemAllocManaged(MemAllocManaged, Managed, flags: c_uint);
    cuMemAllocAsync(MemAllocAsync, Pool, stream: *mut c_void);
    cuMemAllocAsync_ptsz(MemAllocAsync, Pool, stream: *mut c_void);
    cuMemAllocFromPoolAsync(MemAllocFromPoolAsync, Pool, pool: *mut c_void, stream: *mut c_void);
    cuMemAllocFromPoolAsync_ptsz(MemAllocFromPoolAsync, Pool, pool: *mut c_void, stream: *mut c_void);
}

macro_rules! calls {
    ($($name:ident($operation:ident $(, $argument:ident: $type:ty)*) |$process:ident, $driver:ident, $effects:ident| $work:expr;)+) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, reason = "some of the expressions need none")]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> Code {
                $( let _ = std::hint::black_box(&$argument); )*
                std::hint::black_box(stringify!($name));
                // SAFETY: pointers among the arguments are the caller's, as cuda.h says.
                call(Operation::$operation, 0, |$process, $driver, $effects| unsafe { $work })
            }
        )+
    };
}

/// Reads a descriptor; null is an invalid value.
unsafe fn read<'a, T>(pointer: *const T) -> Outcome<&'a T> {
    // SAFETY: null is refused, and otherwise it is the caller's `T`.
    unsafe { pointer.as_ref() }.ok_or(INVALID_VALUE)
}

fn element(format: u32) -> u64 {
    match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    }
}

fn volume(descriptor: &Array3D, levels: u32) -> u64 {
    let Array3D { mut width, mut height, mut depth, format, channels, .. } = *descriptor;
    let mut bytes = 0;
    for _ in 0..levels {
        bytes += width.max(1) * height.max(1) * depth.max(1) * element(format) * u64::from(channels);
        (width, height, depth) = (width / 2, height / 2, depth / 2);
    }
    bytes
}

calls! {
    cuMemAlloc(MemAlloc, out: *mut u64, bytes: c_uint) |process, driver, effects| {
        let address = driver.allocate_low(process, u64::from(bytes), effects)?;
        put(out, address)
    };
    cuMemHostAlloc(MemHostAlloc, out: *mut u64, bytes: usize, flags: c_uint) |_process, driver, effects| {
        let address = driver.allocate_host(bytes as u64, effects)?;
        put(out, address)
    };
    cuMemAllocHost_v2(MemAllocHost, out: *mut u64, bytes: usize) |_process, driver, effects| {
        let address = driver.allocate_host(bytes as u64, effects)?;
        put(out, address)
    };
    cuMemAllocHost(MemAllocHost, out: *mut u64, bytes: c_uint) |_process, driver, effects| {
        let address = driver.allocate_host(u64::from(bytes), effects)?;
        put(out, address)
    };
    cuMemFree_v2(MemFree, address: u64) |process, driver, effects| driver.free(process, address, effects, false);
    cuMemFree(MemFree, address: u64) |process, driver, effects| driver.free(process, address, effects, false);
    cuMemFreeAsync(MemFreeAsync, address: u64, stream: *mut c_void) |process, driver, effects| {
        driver.free(process, address, effects, false)
    };
    cuMemFreeAsync_ptsz(MemFreeAsync, address: u64, stream: *mut c_void) |process, driver, effects| {
        driver.free(process, address, effects, false)
    };
    cuMemFreeHost(MemFreeHost, address: u64) |process, driver, effects| driver.free(process, address, effects, true);
    cuMemHostRegister(MemHostRegister, address: u64, bytes: usize, flags: c_uint) |_process, driver, effects| {
        driver.register(address, bytes as u64, effects)
    };
    cuMemHostRegister_v2(MemHostRegister, address: u64, bytes: usize, flags: c_uint) |_process, driver, effects| {
        driver.register(address, bytes as u64, effects)
    };
    cuMemHostUnregister(MemHostUnregister, address: u64) |_process, driver, effects| {
        driver.unregister(address, effects)
    };
    cuArrayCreate_v2(ArrayCreate, out: *mut u64, descriptor: *const Array2D) |process, driver, effects| {
        let Array2D { width, height, format, channels } = *read(descriptor)?;
        let flat = Array3D { width, height, depth: 0, format, channels, flags: 0 };
        let handle = driver.array(process, volume(&flat, 1), effects)?;
        put(out, handle)
    };
    cuArray3DCreate_v2(Array3DCreate, out: *mut u64, descriptor: *const Array3D) |process, driver, effects| {
        let handle = driver.array(process, volume(read(descriptor)?, 1), effects)?;
        put(out, handle)
    };
    cuMipmappedArrayCreate(MipmappedArrayCreate, out: *mut u64, descriptor: *const Array3D, levels: c_uint)
        |process, driver, effects| {
        let handle = driver.array(process, volume(read(descriptor)?, levels), effects)?;
        put(out, handle)
    };
    cuArrayDestroy(ArrayDestroy, handle: u64) |process, driver, effects| driver.free(process, handle, effects, false);
    cuMipmappedArrayDestroy(MipmappedArrayDestroy, handle: u64) |process, driver, effects| {
        driver.free(process, handle, effects, false)
    };
    cuIpcGetMemHandle(IpcGetMemHandle, out: *mut IpcHandle, address: u64) |_process, driver, _effects| {
        let block = driver.pointers.get(&address).ok_or(INVALID_VALUE)?;
        put(out, IpcHandle { bytes: block.bytes, rest: [0; 56] })
    };
    cuIpcOpenMemHandle(IpcOpenMemHandle, out: *mut u64, handle: IpcHandle, flags: c_uint) |process, driver, effects| {
        let address = driver.import(process, handle.bytes, effects)?;
        put(out, address)
    };
    cuIpcOpenMemHandle_v2(IpcOpenMemHandle, out: *mut u64, handle: IpcHandle, flags: c_uint)
        |process, driver, effects| {
        let address = driver.import(process, handle.bytes, effects)?;
        put(out, address)
    };
    cuIpcCloseMemHandle(IpcCloseMemHandle, address: u64) |_process, driver, effects| {
        driver.close_import(address, effects)
    };
    cuMemPoolImportPointer(MemPoolImportPointer, out: *mut u64, pool: *mut c_void, data: *const IpcHandle)
        |process, driver, effects| {
        let address = driver.import(process, read(data)?.bytes, effects)?;
        put(out, address)
    };
    cuMemPoolCreate(MemPoolCreate, out: *mut u64, properties: *const c_void) |_process, driver, _effects| {
        let pool = driver.address(1);
        put(out, pool)
    };
    cuMemPoolDestroy(MemPoolDestroy, pool: u64) |_process, _driver, _effects| Ok(());
    cuMemPoolTrimTo(MemPoolTrimTo, pool: u64, keep: usize) |process, driver, _effects| driver.trim(process);
    cuMemPoolSetAttribute(MemPoolSetAttribute, pool: u64, attribute: c_int, value: *mut c_void)
        |_process, _driver, _effects| Ok(());
    cuMemAddressReserve(MemAddressReserve, out: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64)
        |_process, driver, _effects| {
        let address = driver.address(bytes as u64);
        put(out, address)
    };
    cuMemAddressFree(MemAddressFree, address: u64, bytes: usize) |_process, _driver, _effects| Ok(());
    cuMemCreate(MemCreate, out: *mut u64, bytes: usize, properties: *const Properties, flags: u64)
        |process, driver, effects| {
        let Properties { location, id, .. } = *read(properties)?;
        let ordinal = (location == 1).then(|| u32::try_from(id).map_err(|_| INVALID_VALUE)).transpose()?;
        let handle = driver.create_physical(process, bytes as u64, ordinal, effects)?;
        put(out, handle)
    };
    cuMemRelease(MemRelease, handle: u64) |process, driver, effects| {
        driver.release_physical(process, handle, effects)
    };
    cuMemRetainAllocationHandle(MemRetainAllocationHandle, out: *mut u64, address: u64)
        |_process, driver, _effects| {
        let handle = driver.retain_physical(address)?;
        put(out, handle)
    };
    cuMemMap(MemMap, address: u64, bytes: usize, offset: usize, handle: u64, flags: u64)
        |_process, driver, effects| driver.map(address, bytes as u64, handle, effects);
    cuMemUnmap(MemUnmap, address: u64, bytes: usize) |process, driver, effects| {
        driver.unmap(process, address, bytes as u64, effects)
    };
    cuMemSetAccess(MemSetAccess, address: u64, bytes: usize, access: *const c_void, count: usize)
        |process, driver, _effects| {
        driver.set_access(process, address, bytes as u64);
        Ok(())
    };
    cuMemExportToShareableHandle(MemExportToShareableHandle, out: *mut u64, handle: u64, kind: c_int, flags: u64)
        |_process, driver, _effects| {
        let (id, _) = *driver.handles.get(&handle).ok_or(INVALID_VALUE)?;
        put(out, id)
    };
    cuMemImportFromShareableHandle(MemImportFromShareableHandle, out: *mut u64, shared: u64, kind: c_int)
        |_process, driver, _effects| {
        let handle = driver.import_physical();
        put(out, handle)
    };
    cuDeviceGetUuid(DeviceGetUuid, out: *mut [u8; 16], device: c_int) |process, driver, _effects| {
        let gpu = driver.gpu(u32::try_from(device).map_err(|_| INVALID_VALUE)?)?;
        put(out, process.node.uuid(gpu))
    };
    cuDeviceGetUuid_v2(DeviceGetUuid, out: *mut [u8; 16], device: c_int) |process, driver, _effects| {
        let gpu = driver.gpu(u32::try_from(device).map_err(|_| INVALID_VALUE)?)?;
        put(out, process.node.uuid(gpu))
    };
    cuDevicePrimaryCtxRetain(PrimaryCtxRetain, out: *mut u64, device: c_int) |process, driver, _effects| {
        let context = driver.retain(process, device.cast_unsigned())?;
        put(out, context)
    };
    cuDevicePrimaryCtxRelease(PrimaryCtxRelease, device: c_int) |process, driver, effects| {
        driver.release(process, device.cast_unsigned(), effects)
    };
    cuDevicePrimaryCtxRelease_v2(PrimaryCtxRelease, device: c_int) |process, driver, effects| {
        driver.release(process, device.cast_unsigned(), effects)
    };
    cuDevicePrimaryCtxReset(PrimaryCtxReset, device: c_int) |process, driver, effects| {
        driver.reset(process, device.cast_unsigned(), effects)
    };
    cuDevicePrimaryCtxReset_v2(PrimaryCtxReset, device: c_int) |process, driver, effects| {
        driver.reset(process, device.cast_unsigned(), effects)
    };
    cuCtxCreate(CtxCreate, out: *mut u64, flags: c_uint, device: c_int) |process, driver, _effects| {
        create(process, driver, out, device)
    };
    cuCtxCreate_v2(CtxCreate, out: *mut u64, flags: c_uint, device: c_int) |process, driver, _effects| {
        create(process, driver, out, device)
    };
    cuCtxCreate_v3(CtxCreate, out: *mut u64, affinity: *const c_void, count: c_int, flags: c_uint, device: c_int)
        |process, driver, _effects| create(process, driver, out, device);
    cuCtxCreate_v4(CtxCreate, out: *mut u64, parameters: *const c_void, flags: c_uint, device: c_int)
        |process, driver, _effects| create(process, driver, out, device);
    cuCtxDestroy(CtxDestroy, context: u64) |process, driver, effects| driver.destroy_context(process, context, effects);
    cuCtxDestroy_v2(CtxDestroy, context: u64) |process, driver, effects| {
        driver.destroy_context(process, context, effects)
    };
    cuCtxSetCurrent(CtxSetCurrent, context: u64) |_process, driver, _effects| {
        if context != 0 && !driver.contexts.contains_key(&context) {
            return Err(crate::INVALID_CONTEXT);
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    };
    cuCtxPushCurrent(CtxPushCurrent, context: u64) |_process, driver, _effects| push(driver, context);
    cuCtxPushCurrent_v2(CtxPushCurrent, context: u64) |_process, driver, _effects| push(driver, context);
    cuCtxPopCurrent(CtxPopCurrent, out: *mut u64) |_process, _driver, _effects| pop(out);
    cuCtxPopCurrent_v2(CtxPopCurrent, out: *mut u64) |_process, _driver, _effects| pop(out);
}

unsafe fn create(process: &Process, driver: &mut Driver, out: *mut u64, device: c_int) -> Outcome<()> {
    let context = driver.create(process, device.cast_unsigned())?;
    CURRENT.with_borrow_mut(|stack| stack.push(context));
    // SAFETY: the caller's.
    unsafe { put(out, context) }
}

fn push(driver: &Driver, context: u64) -> Outcome<()> {
    if !driver.contexts.contains_key(&context) {
        return Err(crate::INVALID_CONTEXT);
    }
    CURRENT.with_borrow_mut(|stack| stack.push(context));
    Ok(())
}

unsafe fn pop(out: *mut u64) -> Outcome<()> {
    let top = CURRENT.with_borrow_mut(Vec::pop).ok_or(crate::INVALID_CONTEXT)?;
    // SAFETY: the caller's.
    unsafe { put(out, top) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: c_uint) -> Code {
    std::hint::black_box(flags);
    initialise()
}

/// With `COTENANT_SIM_NESTED` set it calls the exported `cuMemAlloc_v2` for its memory, as no real driver does
/// today and some might.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocPitch_v2(
    out: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> Code {
    std::hint::black_box(element);
    let row = width.next_multiple_of(512);
    let bytes = (row * height) as u64;
    let mut nested = std::env::var_os("COTENANT_SIM_NESTED").is_some().then_some(0u64);
    if let Some(address) = &mut nested {
        let alloc: unsafe extern "C" fn(*mut u64, usize) -> Code = std::hint::black_box(cuMemAlloc_v2);
        // SAFETY: our own function with our own result.
        let code = unsafe { alloc(address, row * height) };
        if code != 0 {
            return code;
        }
    }
    call(Operation::MemAllocPitch, bytes, |process, driver, effects| {
        let address = match nested {
            // The inner call has booked it.
            Some(address) => address,
            None => driver.allocate(process, bytes, MemoryKind::Device, effects)?,
        };
        // SAFETY: the caller's.
        unsafe {
            put(pitch, row)?;
            put(out, address)
        }
    })
}

/// Tests only: the next `times` calls of an operation fail. Not a symbol of any driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cotenantSimInject(operation: c_uint, code: c_int, times: c_uint) -> Code {
    let Some(operation) = u8::try_from(operation).ok().and_then(Operation::from_tag) else {
        return INVALID_VALUE;
    };
    crate::call::inject(operation, code, times)
}

/// Tests only: the next `times` calls of an operation take so much longer. Not a symbol of any driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cotenantSimDelay(
    operation: c_uint,
    kind: c_uint,
    milliseconds: c_uint,
    times: c_uint,
) -> Code {
    let Some(operation) = u8::try_from(operation).ok().and_then(Operation::from_tag) else {
        return INVALID_VALUE;
    };
    crate::call::delay(operation, kind, milliseconds, times)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(out: *mut c_int) -> Code {
    answer(|_, driver| {
        // SAFETY: the caller's.
        unsafe { put(out, c_int::try_from(driver.visible.len()).unwrap_or(0)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(out: *mut c_int, ordinal: c_int) -> Code {
    answer(|_, driver| {
        driver.gpu(ordinal.cast_unsigned())?;
        // SAFETY: the caller's.
        unsafe { put(out, ordinal) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    answer(|process, driver| {
        let (_, context) = driver.current()?;
        let (capacity, reserved, used) = process.node.memory(context.gpu);
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller's.
        unsafe {
            put(free, size(capacity - reserved - used))?;
            put(total, size(capacity))
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(out: *mut u64, flags: c_uint) -> Code {
    std::hint::black_box(flags);
    answer(|_, driver| {
        let stream = driver.address(1);
        // SAFETY: the caller's.
        unsafe { put(out, stream) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: u64) -> Code {
    std::hint::black_box(stream);
    answer(|_, _| Ok(()))
}

/// An untraced call: no lock, no record.
fn answer(work: impl FnOnce(&Process, &mut Driver) -> Outcome<()>) -> Code {
    let process = match process() {
        Ok(process) => process,
        Err(code) => return code,
    };
    crate::call::with_driver(|driver| work(process, driver)).err().unwrap_or(0)
}

/// Pointers by name, versioned as the runtime asks for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    out: *mut u64,
    version: c_int,
    flags: u64,
) -> Code {
    std::hint::black_box(version);
    // SAFETY: the caller gives a C string and an out pointer.
    unsafe { find(name, out, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    out: *mut u64,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> Code {
    std::hint::black_box((version, status));
    // SAFETY: as above.
    unsafe { find(name, out, flags) }
}

/// Newest version first; with flag 2 (per-thread default stream) the `_ptsz` twin before it.
unsafe fn find(name: *const c_char, out: *mut u64, flags: u64) -> Code {
    // SAFETY: a C string of the caller's.
    let Ok(name) = unsafe { CStr::from_ptr(name) }.to_str() else { return INVALID_VALUE };
    let suffixes: &[&str] = if flags & 2 != 0 { &["_ptsz", "_v4", "_v2", ""] } else { &["_v4", "_v2", ""] };
    for suffix in suffixes {
        let Ok(symbol) = std::ffi::CString::new(format!("{name}{suffix}")) else { return INVALID_VALUE };
        let mut own = libc::Dl_info {
            dli_fname: std::ptr::null(),
            dli_fbase: std::ptr::null_mut(),
            dli_sname: std::ptr::null(),
            dli_saddr: std::ptr::null_mut(),
        };
        // SAFETY: asks the loader about this very library and for a symbol of it.
        let address = unsafe {
            libc::dladdr(find as *const c_void, &raw mut own);
            let library = libc::dlopen(own.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD);
            libc::dlsym(library, symbol.as_ptr())
        };
        if !address.is_null() {
            // SAFETY: the caller's.
            return unsafe { put(out, address as u64) }.err().unwrap_or(0);
        }
    }
    NOT_FOUND
}
