//! Owns building the eBPF object as part of `cargo build`.
//! Refuses to guess a toolchain: it looks for the two known ones and says the one command that brings them.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

const TARGET: &str = "bpfel-unknown-none";

/// A way to compile for BPF on this machine.
enum Toolchain {
    /// Debian's rustc-web with libstd-rust-web-dev-bpf: `core` comes prebuilt.
    Debian(PathBuf),
    /// rustup's nightly with rust-src: `core` is built here.
    Nightly,
}

fn main() -> ExitCode {
    // At run time: a build directory that was copied from elsewhere must not look elsewhere.
    let Some(manifest) = env::var_os("CARGO_MANIFEST_DIR") else {
        eprintln!("cargo sets CARGO_MANIFEST_DIR");
        return ExitCode::FAILURE;
    };
    let root = Path::new(&manifest).join("../..");
    for watched in ["ebpf/programs/src", "ebpf/programs/Cargo.toml", "ebpf/abi/src"] {
        println!("cargo::rerun-if-changed={}", root.join(watched).display());
    }
    println!("cargo::rerun-if-env-changed=COTENANT_EBPF_OBJECT");
    match build(&root.join("ebpf/programs")) {
        Ok(object) => {
            println!("cargo::rustc-env=COTENANT_EBPF_OBJECT={}", object.display());
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn build(programs: &Path) -> Result<PathBuf, String> {
    // A packager may bring an object built elsewhere.
    if let Some(object) = env::var_os("COTENANT_EBPF_OBJECT").filter(|path| !path.is_empty()) {
        return Ok(object.into());
    }
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").map_err(|error| error.to_string())?;
    if !["x86_64", "aarch64"].contains(&architecture.as_str()) {
        return Err(format!("no eBPF programs for {architecture}: x86_64 and aarch64 are supported"));
    }
    if !answers("bpf-linker", &["--version"]) {
        return Err("bpf-linker is missing: run `make setup`".to_owned());
    }
    let toolchain = find().ok_or(
        "no Rust toolchain here compiles for BPF: run `make setup` (Debian's rustc-web and \
         libstd-rust-web-dev-bpf, or rustup's nightly with rust-src)",
    )?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let target = out.join("ebpf");
    let mut cargo = match &toolchain {
        Toolchain::Debian(rustc) => {
            let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
            cargo.env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "aya_ebpf,cotenant_ebpf");
            cargo
        }
        Toolchain::Nightly => {
            let mut rustup = Command::new("rustup");
            rustup.args(["run", "nightly", "cargo"]).env_remove("RUSTC").env_remove("CARGO");
            rustup
        }
    };
    cargo
        .current_dir(programs)
        .args(["build", "--release", "--locked", "--target", TARGET, "--target-dir"])
        .arg(&target)
        // What cargo set for the agent's own build must not leak into this one.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env("RUSTFLAGS", format!("--cfg bpf_target_arch=\"{architecture}\" -Clink-arg=--btf"));
    if matches!(toolchain, Toolchain::Nightly) {
        cargo.args(["-Z", "build-std=core"]);
    }
    let status =
        cargo.status().map_err(|error| format!("cannot start cargo for the eBPF programs: {error}"))?;
    if !status.success() {
        return Err(format!("the eBPF programs did not build ({status}), see above"));
    }
    Ok(target.join(TARGET).join("release/cotenant-ebpf"))
}

fn find() -> Option<Toolchain> {
    let rustc = Path::new("/usr/bin/rustc");
    let prebuilt = Command::new(rustc)
        .args(["--print", "target-libdir", "--target", TARGET])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .is_some_and(|directory| Path::new(directory.trim()).is_dir());
    if prebuilt {
        return Some(Toolchain::Debian(rustc.to_owned()));
    }
    let source = Command::new("rustup")
        .args(["run", "nightly", "rustc", "--print", "sysroot"])
        .output()
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .is_some_and(|sysroot| Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core").is_dir());
    source.then_some(Toolchain::Nightly)
}

fn answers(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}
