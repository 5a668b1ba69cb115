//! Owns an image with the simulated tenant in it, as an archive that Docker, Podman and containerd load without a registry.
//! Refuses more than the tenant and what it is linked with.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use cotenant_node::artefacts;
use serde_json::json;

use crate::enclosure::said;

pub(crate) const IMAGE: &str = "cotenant.test/tenant:1";

/// The archive. The image's own command does nothing, for ever.
pub(crate) fn archive(directory: &Path) -> Result<PathBuf> {
    let (root, parts) = (directory.join("image"), directory.join("parts"));
    let program = artefacts()?.join("cotenant-sim-tenant");
    let linked = said(Command::new("ldd").arg(&program))?;
    for made in ["tmp", "proc", "sys", "dev", "etc"] {
        fs::create_dir_all(root.join(made))?;
    }
    fs::create_dir_all(&parts)?;
    fs::copy(&program, root.join("tenant"))?;
    fs::write(root.join("idle.script"), "nodriver\nsleep 600000\n")?;
    for file in linked.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(file.trim_start_matches('/'));
        fs::create_dir_all(to.parent().context("a library lies in a directory")?)?;
        fs::copy(file, to)?;
    }
    let tar =
        |from: &Path, to: &Path| said(Command::new("tar").arg("-C").arg(from).arg("-cf").arg(to).arg("."));
    let layer = parts.join("layer.tar");
    tar(&root, &layer)?;
    let sum = said(Command::new("sha256sum").arg(&layer))?;
    let digest = sum.split_whitespace().next().context("a sum")?;
    let config = json!({
        "architecture": architecture(), "os": "linux",
        "config": { "Cmd": ["/tenant", "/idle.script"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    });
    fs::write(parts.join("config.json"), config.to_string())?;
    let manifest = json!([{ "Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"] }]);
    fs::write(parts.join("manifest.json"), manifest.to_string())?;
    let archive = directory.join("image.tar");
    said(Command::new("tar").arg("-C").arg(&parts).arg("-cf").arg(&archive).args([
        "manifest.json",
        "config.json",
        "layer.tar",
    ]))?;
    Ok(archive)
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
