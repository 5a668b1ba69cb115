//! Owns the way to the driver: loaded when asked, symbols by name.
//! Refuses signatures: every argument of the calls used here fits a register.

use std::{
    collections::HashMap,
    ffi::{CStr, CString, c_void},
    sync::Mutex,
};

type Call = unsafe extern "C" fn(u64, u64, u64, u64, u64) -> i32;

#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle {
    bytes: u64,
    rest: [u8; 56],
}

pub(crate) struct Cuda {
    library: *mut c_void,
    by_lookup: bool,
    known: Mutex<HashMap<String, Call>>,
}

// SAFETY: the handle is only passed to dlsym, which any thread may call.
unsafe impl Sync for Cuda {}

impl Cuda {
    pub(crate) fn load() -> Result<Self, String> {
        let name = std::env::var("COTENANT_SIM_LIBCUDA").unwrap_or_else(|_| "libcuda.so.1".to_owned());
        let path = CString::new(name.clone()).map_err(|error| error.to_string())?;
        // SAFETY: loads the library that the environment names.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(format!(
                "cannot load {name}; set COTENANT_SIM_LIBCUDA to the simulated libcuda.so.1"
            ));
        }
        let by_lookup = std::env::var("COTENANT_SIM_RESOLVE").is_ok_and(|how| how == "procaddress");
        Ok(Self { library, by_lookup, known: Mutex::new(HashMap::new()) })
    }

    /// For a program that has nothing to do with the driver.
    pub(crate) fn absent() -> Self {
        Self { library: std::ptr::null_mut(), by_lookup: false, known: Mutex::default() }
    }

    fn symbol(&self, name: &str) -> Result<*mut c_void, String> {
        if self.library.is_null() {
            return Err(format!("{name} wants the driver, and the script says nodriver"));
        }
        let symbol = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: a live handle and a C string.
        let address = unsafe { libc::dlsym(self.library, symbol.as_ptr()) };
        if address.is_null() { Err(format!("the driver does not export {name}")) } else { Ok(address) }
    }

    /// As the CUDA runtime does it: by base name, the newest version comes back.
    fn lookup(&self, name: &str) -> Result<*mut c_void, String> {
        type Lookup = unsafe extern "C" fn(*const libc::c_char, *mut u64, i32, u64, *mut i32) -> i32;
        let stream = u64::from(name.ends_with("_ptsz")) * 2;
        let base = name.trim_end_matches("_ptsz").trim_end_matches("_v2");
        let base = CString::new(base).map_err(|error| error.to_string())?;
        // SAFETY: the symbol has this signature in every driver since CUDA 12.
        let lookup: Lookup = unsafe { std::mem::transmute(self.symbol("cuGetProcAddress_v2")?) };
        let mut address = 0u64;
        // SAFETY: a C string and an out pointer, as the function wants.
        let code = unsafe { lookup(base.as_ptr(), &raw mut address, 13_000, stream, std::ptr::null_mut()) };
        if code == 0 { Ok(address as *mut c_void) } else { self.symbol(name) }
    }

    /// Calls a function whose arguments are five registers or fewer.
    pub(crate) fn call(&self, name: &str, arguments: [u64; 5]) -> Result<i32, String> {
        let mut known = self.known.lock().map_err(|_| "a thread panicked".to_owned())?;
        let call = if let Some(call) = known.get(name) {
            *call
        } else {
            let address = if self.by_lookup { self.lookup(name)? } else { self.symbol(name)? };
            // SAFETY: an exported function of the C ABI; unused registers do no harm.
            let call: Call = unsafe { std::mem::transmute(address) };
            known.insert(name.to_owned(), call);
            call
        };
        drop(known);
        let [first, second, third, fourth, fifth] = arguments;
        // SAFETY: out pointers among the arguments are this program's own and alive.
        Ok(unsafe { call(first, second, third, fourth, fifth) })
    }

    /// The handle goes by value, on the stack.
    pub(crate) fn open_ipc(&self, out: &mut u64, bytes: u64) -> Result<i32, String> {
        type Open = unsafe extern "C" fn(*mut u64, IpcHandle, u32) -> i32;
        // SAFETY: the symbol has this signature since CUDA 11.
        let open: Open = unsafe { std::mem::transmute(self.symbol("cuIpcOpenMemHandle_v2")?) };
        // SAFETY: an out pointer and a handle by value, as the function wants.
        Ok(unsafe { open(out, IpcHandle { bytes, rest: [0; 56] }, 1) })
    }

    /// Makes what is current in one thread current in this one.
    pub(crate) fn adopt(&self, context: u64) -> Result<(), String> {
        if self.library.is_null() {
            return Ok(());
        }
        self.call("cuCtxSetCurrent", [context, 0, 0, 0, 0]).map(|_| ())
    }

    /// The context that is current in this thread, 0 for none.
    pub(crate) fn current(&self) -> Result<u64, String> {
        if self.library.is_null() {
            return Ok(0);
        }
        let mut handle = 0u64;
        if self.call("cuCtxPopCurrent_v2", [&raw mut handle as u64, 0, 0, 0, 0])? != 0 {
            return Ok(0);
        }
        self.call("cuCtxPushCurrent_v2", [handle, 0, 0, 0, 0])?;
        Ok(handle)
    }

    /// A call of a name known at compile time, for loops that are timed.
    pub(crate) fn fast(
        &self,
        name: &CStr,
    ) -> Result<impl Fn(u64, u64, u64, u64) -> i32 + Copy + use<>, String> {
        let address = self.symbol(name.to_str().map_err(|error| error.to_string())?)?;
        // SAFETY: as in `call`.
        let call: Call = unsafe { std::mem::transmute(address) };
        // SAFETY: as in `call`.
        Ok(move |a, b, c, d| unsafe { call(a, b, c, d, 0) })
    }
}
