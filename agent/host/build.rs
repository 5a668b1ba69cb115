//! Owns the gRPC clients of kubelet and of the container runtime, made from `proto/` without protoc.
//! Refuses everything that is not under `proto/`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["proto/podresources.proto", "proto/cri.proto"], ["proto"])?;
    // The servers are for the tests, which answer as kubelet does.
    tonic_prost_build::configure().server_mod_attribute(".", "#[cfg(test)]").compile_fds(files)?;
    Ok(())
}
