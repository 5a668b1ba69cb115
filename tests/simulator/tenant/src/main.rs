//! Owns a program that does to the driver what its script says, one step a line.
//! Refuses a script that it does not understand: with the line, and what is allowed.
//!
//! Steps: `init` · `uuid D` · `retain D` · `release D` · `reset D` · `ctx_create NAME D [v1|v2|v3|v4]` ·
//! `ctx_destroy NAME` · `ctx_set NAME` · `push NAME` · `pop` · `alloc NAME BYTES [SYMBOL]` · `pitch NAME WIDTH HEIGHT` ·
//! `array NAME WIDTH HEIGHT` · `mipmap NAME WIDTH HEIGHT LEVELS` · `register NAME BYTES` · `free NAME [SYMBOL]` ·
//! `free_again NAME` · `free_raw ADDRESS` · `trim` · `create NAME BYTES D` · `map NAME` · `unmap NAME` · `handle_release NAME` ·
//! `handle_retain NAME` · `access NAME` · `ipc NAME BYTES` · `inject OPERATION CODE TIMES` · `expect CODE` · `random SEED CALLS` ·
//! `delay OPERATION busy|reclaim|uvm_eviction|device MS TIMES` (with the locks of the call) · `hang OPERATION MS` (a delay of
//! its next call in the device) · `loop N { … }` · `for MS { … }` · `threads N { … }` · `background { … }` · `fork { … }` ·
//! `exec SCRIPT` · `leader_exit` · `sleep MS` · `pause US` · `spin MS` · `hold api|gpuN MS [shared]` (the driver's lock, in no
//! call) · `eat BYTES` · `oom` (eat until killed) · `die` (by SIGKILL) · `print TEXT` · `wait` (for a line on standard
//! input) · `crash` · `exit CODE`.
//! BYTES take KiB, MiB and GiB. The driver is loaded before the first step, unless that one is `nodriver`.

mod cuda;
mod host;
mod random;
mod script;

use std::{
    collections::HashMap,
    io::{BufRead, Read, Write},
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use cuda::Cuda;
use script::{Step, StepError};

/// What a thread of the program knows by name.
#[derive(Clone, Default)]
struct Names {
    pointers: HashMap<String, u64>,
    contexts: HashMap<String, u64>,
    handles: HashMap<String, Mapped>,
    last: i32,
}

#[derive(Clone, Copy, Default)]
struct Mapped {
    handle: u64,
    bytes: u64,
    address: u64,
}

fn main() -> ExitCode {
    let Some(argument) = std::env::args().nth(1) else {
        eprintln!("usage: cotenant-sim-tenant SCRIPT (or - for standard input); the steps are in its source");
        return ExitCode::from(2);
    };
    let text = if argument == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(&argument)
    };
    let outcome = text
        .map_err(|error| StepError { line: 0, reason: format!("cannot read {argument}: {error}") })
        .and_then(|text| script::parse(&text))
        .and_then(|steps| {
            // For ever: threads in the background outlive this one.
            let steps: &'static [Step] = steps.leak();
            let without = steps.first().is_some_and(|step| step.word == "nodriver");
            let cuda = if without { Ok(Cuda::absent()) } else { Cuda::load() };
            let cuda: &'static Cuda =
                Box::leak(Box::new(cuda.map_err(|reason| StepError { line: 0, reason })?));
            run(cuda, steps, &mut Names::default())
        });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(StepError { line, reason }) => {
            eprintln!("{argument}:{line}: {reason}");
            ExitCode::from(if reason.starts_with("expected") { 3 } else { 2 })
        }
    }
}

fn run(cuda: &'static Cuda, steps: &'static [Step], names: &mut Names) -> Result<(), StepError> {
    for step in steps {
        one(cuda, step, names).map_err(|reason| StepError { line: step.line, reason })?;
    }
    Ok(())
}

fn pointer(names: &Names, name: &str) -> Result<u64, String> {
    names.pointers.get(name).copied().ok_or_else(|| format!("no pointer is called {name}"))
}

fn context(names: &Names, name: &str) -> Result<u64, String> {
    names.contexts.get(name).copied().ok_or_else(|| format!("no context is called {name}"))
}

fn mapped(names: &Names, name: &str) -> Result<Mapped, String> {
    names.handles.get(name).copied().ok_or_else(|| format!("no handle is called {name}"))
}

#[allow(clippy::too_many_lines, reason = "one arm a step: the list is the program")]
fn one(cuda: &'static Cuda, step: &'static Step, names: &mut Names) -> Result<(), String> {
    match step.word.as_str() {
        "init" => names.last = cuda.call("cuInit", [0; 5])?,
        "uuid" => {
            let mut uuid = [0u8; 16];
            names.last =
                cuda.call("cuDeviceGetUuid_v2", [uuid.as_mut_ptr() as u64, step.number(0)?, 0, 0, 0])?;
        }
        "retain" => {
            let device = step.number(0)?;
            let mut handle = 0u64;
            names.last = cuda.call("cuDevicePrimaryCtxRetain", [&raw mut handle as u64, device, 0, 0, 0])?;
            if names.last == 0 {
                names.contexts.insert(format!("primary{device}"), handle);
                names.last = cuda.call("cuCtxSetCurrent", [handle, 0, 0, 0, 0])?;
            }
        }
        "release" => names.last = cuda.call("cuDevicePrimaryCtxRelease_v2", [step.number(0)?, 0, 0, 0, 0])?,
        "reset" => names.last = cuda.call("cuDevicePrimaryCtxReset_v2", [step.number(0)?, 0, 0, 0, 0])?,
        "ctx_create" => {
            let (name, device) = (step.text(0)?, step.number(1)?);
            let mut handle = 0u64;
            let out = &raw mut handle as u64;
            names.last = match step.optional(2).unwrap_or("v2") {
                "v1" => cuda.call("cuCtxCreate", [out, 0, device, 0, 0])?,
                "v3" => cuda.call("cuCtxCreate_v3", [out, 0, 0, 0, device])?,
                "v4" => cuda.call("cuCtxCreate_v4", [out, 0, 0, device, 0])?,
                _ => cuda.call("cuCtxCreate_v2", [out, 0, device, 0, 0])?,
            };
            names.contexts.insert(name.to_owned(), handle);
        }
        "ctx_destroy" => {
            names.last = cuda.call("cuCtxDestroy_v2", [context(names, step.text(0)?)?, 0, 0, 0, 0])?;
        }
        "ctx_set" => {
            names.last = cuda.call("cuCtxSetCurrent", [context(names, step.text(0)?)?, 0, 0, 0, 0])?;
        }
        "push" => {
            names.last = cuda.call("cuCtxPushCurrent_v2", [context(names, step.text(0)?)?, 0, 0, 0, 0])?;
        }
        "pop" => {
            let mut handle = 0u64;
            names.last = cuda.call("cuCtxPopCurrent_v2", [&raw mut handle as u64, 0, 0, 0, 0])?;
        }
        "alloc" => {
            let (name, bytes) = (step.text(0)?, step.bytes(1)?);
            let symbol = step.optional(2).unwrap_or("cuMemAlloc_v2");
            let mut address = 0u64;
            names.last = cuda.call(symbol, [&raw mut address as u64, bytes, 0, 0, 0])?;
            if names.last == 0 {
                names.pointers.insert(name.to_owned(), address);
            }
        }
        "pitch" => {
            let (name, width, height) = (step.text(0)?, step.number(1)?, step.number(2)?);
            let (mut address, mut pitch) = (0u64, 0u64);
            let arguments = [&raw mut address as u64, &raw mut pitch as u64, width, height, 4];
            names.last = cuda.call("cuMemAllocPitch_v2", arguments)?;
            names.pointers.insert(name.to_owned(), address);
        }
        "array" => {
            let name = step.text(0)?;
            let descriptor = [step.number(1)?, step.number(2)?, 0x20 | 4 << 32];
            let mut handle = 0u64;
            let arguments = [&raw mut handle as u64, descriptor.as_ptr() as u64, 0, 0, 0];
            names.last = cuda.call("cuArrayCreate_v2", arguments)?;
            names.pointers.insert(name.to_owned(), handle);
        }
        "mipmap" => {
            let name = step.text(0)?;
            let descriptor = [step.number(1)?, step.number(2)?, 0, 0x20 | 1 << 32, 0];
            let mut handle = 0u64;
            let arguments = [&raw mut handle as u64, descriptor.as_ptr() as u64, step.number(3)?, 0, 0];
            names.last = cuda.call("cuMipmappedArrayCreate", arguments)?;
            names.pointers.insert(name.to_owned(), handle);
        }
        "register" => {
            let address = 0x5000_0000_0000 + names.pointers.len() as u64 * 0x1000_0000;
            names.last = cuda.call("cuMemHostRegister_v2", [address, step.bytes(1)?, 0, 0, 0])?;
            names.pointers.insert(step.text(0)?.to_owned(), address);
        }
        "ipc" => {
            let mut address = 0u64;
            names.last = cuda.open_ipc(&mut address, step.bytes(1)?)?;
            names.pointers.insert(step.text(0)?.to_owned(), address);
        }
        "free" | "free_again" => {
            let address = pointer(names, step.text(0)?)?;
            let symbol = step.optional(1).unwrap_or("cuMemFree_v2");
            names.last = cuda.call(symbol, [address, 0, 0, 0, 0])?;
        }
        "trim" => names.last = cuda.call("cuMemPoolTrimTo", [1, 0, 0, 0, 0])?,
        "free_raw" => names.last = cuda.call("cuMemFree_v2", [step.number(0)?, 0, 0, 0, 0])?,
        "create" => {
            let (name, bytes, device) = (step.text(0)?, step.bytes(1)?, step.number(2)?);
            let mut handle = 0u64;
            // type pinned, no shareable handle; location: a device.
            let properties = [1u64, 1 | device << 32];
            let arguments = [&raw mut handle as u64, bytes, properties.as_ptr() as u64, 0, 0];
            names.last = cuda.call("cuMemCreate", arguments)?;
            if names.last == 0 {
                names.handles.insert(name.to_owned(), Mapped { handle, bytes, address: 0 });
            }
        }
        "map" => {
            let mut of = mapped(names, step.text(0)?)?;
            cuda.call("cuMemAddressReserve", [&raw mut of.address as u64, of.bytes, 0, 0, 0])?;
            names.last = cuda.call("cuMemMap", [of.address, of.bytes, 0, of.handle, 0])?;
            cuda.call("cuMemSetAccess", [of.address, of.bytes, 0, 0, 0])?;
            names.handles.insert(step.text(0)?.to_owned(), of);
        }
        "unmap" => {
            let of = mapped(names, step.text(0)?)?;
            names.last = cuda.call("cuMemUnmap", [of.address, of.bytes, 0, 0, 0])?;
            cuda.call("cuMemAddressFree", [of.address, of.bytes, 0, 0, 0])?;
        }
        "handle_release" => {
            names.last = cuda.call("cuMemRelease", [mapped(names, step.text(0)?)?.handle, 0, 0, 0, 0])?;
        }
        "handle_retain" => {
            let of = mapped(names, step.text(0)?)?;
            let mut handle = 0u64;
            let arguments = [&raw mut handle as u64, of.address, 0, 0, 0];
            names.last = cuda.call("cuMemRetainAllocationHandle", arguments)?;
        }
        "inject" => {
            let operation = script::operation(step.text(0)?)?;
            cuda.call("cotenantSimInject", [u64::from(operation), step.number(1)?, step.number(2)?, 0, 0])?;
        }
        "delay" => {
            let kind = match step.text(1)? {
                "busy" => 0,
                "reclaim" => 1,
                "uvm_eviction" => 2,
                "device" => 3,
                other => {
                    return Err(format!("{other:?} is no delay; busy, reclaim, uvm_eviction, device are"));
                }
            };
            delay(cuda, step, kind, step.number(2)?, step.number(3)?)?;
        }
        "hang" => delay(cuda, step, 3, step.number(1)?, 1)?,
        "access" => {
            let of = mapped(names, step.text(0)?)?;
            names.last = cuda.call("cuMemSetAccess", [of.address, of.bytes, 0, 0, 0])?;
        }
        "expect" => {
            let code = step.number(0)?;
            if i64::from(names.last) != i64::try_from(code).unwrap_or(-1) {
                return Err(format!("expected code {code}, the last call gave {}", names.last));
            }
        }
        "random" => random::run(cuda, step.number(0)?, step.number(1)?)?,
        "loop" => {
            for _ in 0..step.number(0)? {
                run(cuda, &step.block, names)
                    .map_err(|error| format!("line {}: {}", error.line, error.reason))?;
            }
        }
        "for" => {
            let until = Instant::now() + Duration::from_millis(step.number(0)?);
            while Instant::now() < until {
                run(cuda, &step.block, names)
                    .map_err(|error| format!("line {}: {}", error.line, error.reason))?;
            }
        }
        "threads" => threads(cuda, step, names)?,
        "background" => {
            let context = cuda.current()?;
            let mut own = names.clone();
            std::thread::spawn(move || {
                let outcome = cuda.adopt(context).and_then(|()| {
                    run(cuda, &step.block, &mut own)
                        .map_err(|error| format!("line {}: {}", error.line, error.reason))
                });
                if let Err(reason) = outcome {
                    eprintln!("in the background: {reason}");
                    std::process::exit(2);
                }
            });
        }
        "fork" => fork(cuda, step, names)?,
        "exec" => {
            let program = std::env::current_exe().map_err(|error| error.to_string())?;
            let error = Command::new(program).arg(step.text(0)?).exec();
            return Err(format!("cannot exec: {error}"));
        }
        "leader_exit" => {
            // SAFETY: ends only this thread, at once; the others go on, and the process with them.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        "sleep" => std::thread::sleep(Duration::from_millis(step.number(0)?)),
        "spin" => {
            let until = Instant::now() + Duration::from_millis(step.number(0)?);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        "print" => {
            println!("{}", step.arguments.join(" "));
            std::io::stdout().flush().map_err(|error| error.to_string())?;
        }
        "wait" => {
            std::io::stdin().lock().read_line(&mut String::new()).map_err(|error| error.to_string())?;
        }
        "crash" => std::process::abort(),
        "exit" => {
            let code = i32::try_from(step.number(0)?).unwrap_or(1);
            // SAFETY: ends at once, without handlers: what the process holds is not freed.
            unsafe { libc::_exit(code) }
        }
        "nodriver" => {}
        _ => host::one(step)?,
    }
    Ok(())
}

/// Kinds as the simulated driver numbers them.
fn delay(cuda: &Cuda, step: &Step, kind: u64, milliseconds: u64, times: u64) -> Result<(), String> {
    let operation = script::operation(step.text(0)?)?;
    cuda.call("cotenantSimDelay", [u64::from(operation), kind, milliseconds, times, 0]).map(|_| ())
}

/// Each thread has names of its own and the context that is current here.
fn threads(cuda: &'static Cuda, step: &'static Step, names: &Names) -> Result<(), String> {
    let count = step.number(0)?;
    let context = cuda.current()?;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..count)
            .map(|_| {
                let mut own = names.clone();
                scope.spawn(move || {
                    cuda.adopt(context)?;
                    run(cuda, &step.block, &mut own)
                        .map_err(|error| format!("line {}: {}", error.line, error.reason))
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| "a thread panicked".to_owned())?)
    })
}

fn fork(cuda: &'static Cuda, step: &'static Step, names: &Names) -> Result<(), String> {
    // SAFETY: this program has one thread where its scripts fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = i32::from(run(cuda, &step.block, &mut names.clone()).is_err());
        // SAFETY: the child must not run its parent's handlers.
        unsafe { libc::_exit(code) }
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    if status == 0 { Ok(()) } else { Err(format!("the forked child ended with status {status}")) }
}
