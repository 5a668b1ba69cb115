//! Owns the gRPC servers that the tests answer as kubelet and as a container runtime with, and the client that makes pods at
//! a real runtime; made without protoc.
//! Refuses a wording of its own for the servers: the files are those that the agent's clients are made from.

use std::{env, fs, path::PathBuf};

const PROTO: &str = "../../agent/host/proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed={PROTO}");
    println!("cargo:rerun-if-changed=kubelet.proto");
    let files = ["podresources.proto", "cri.proto"].map(|file| format!("{PROTO}/{file}"));
    tonic_prost_build::configure().build_client(false).compile_fds(protox::compile(files, [PROTO])?)?;
    // The same package: beside the other's file.
    let kubelet = PathBuf::from(env::var("OUT_DIR")?).join("kubelet");
    fs::create_dir_all(&kubelet)?;
    tonic_prost_build::configure()
        .build_server(false)
        .out_dir(kubelet)
        .compile_fds(protox::compile(["kubelet.proto"], ["."])?)?;
    Ok(())
}
