//! Owns the gRPC servers that the tests answer as kubelet and as a container runtime with, made without protoc.
//! Refuses a wording of its own: the files are those that the agent's clients are made from.

const PROTO: &str = "../../agent/host/proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed={PROTO}");
    let files = ["podresources.proto", "cri.proto"].map(|file| format!("{PROTO}/{file}"));
    tonic_prost_build::configure().build_client(false).compile_fds(protox::compile(files, [PROTO])?)?;
    Ok(())
}
