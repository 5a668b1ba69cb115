//! Owns the support bundle: one archive with what somebody elsewhere needs to see.
//! Refuses secrets, and files without a bound; what is in it, and what is not, its own `manifest.txt` says.

use std::{
    fmt::Write as _,
    fs::OpenOptions,
    io::Write as _,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use flate2::{Compression, write::GzEncoder};
use tar::{Builder, Header};

use super::{ask::fetch, facts::Facts};
use crate::{
    client::Access,
    config::{self, Overrides},
    redact,
};

/// Of one file, before compression.
const MAX_ENTRY: usize = 8 << 20;
const MAX_CONFIGURATION: u64 = 1 << 20;
const PAGES: [(&str, &str); 6] = [
    ("status.json", "/status"),
    ("ready.txt", "/readyz"),
    ("metrics.txt", "/metrics"),
    ("node.json", "/api/v1/node"),
    ("incidents.json", "/api/v1/incidents?since=24h"),
    ("kills.json", "/api/v1/kills?since=24h"),
];

struct Entry {
    name: &'static str,
    content: String,
}

/// Writes the bundle; gives what is in it, for people.
pub(super) fn write(
    path: &Path,
    facts: &Facts,
    doctor: &str,
    overrides: &Overrides,
    access: &Access,
) -> Result<String> {
    let mut left_out = Vec::new();
    let mut entries = vec![Entry { name: "doctor.json", content: redact::urls(doctor) }];
    match configuration(overrides) {
        Ok(Some(content)) => entries.push(Entry { name: "cotenant.toml", content }),
        Ok(None) => left_out.push("cotenant.toml: there is none, the defaults are in force".to_owned()),
        Err(reason) => left_out.push(format!("cotenant.toml: {reason}")),
    }
    let answering = facts.agent.as_ref().filter(|agent| agent.status.is_ok());
    for (name, page) in PAGES {
        match answering.map(|agent| fetch(agent.address, page, access)) {
            Some(Ok((200 | 503, text))) => entries.push(Entry { name, content: redact::urls(&text) }),
            Some(Ok((code, _))) => left_out.push(format!("{name}: the agent says {code}")),
            Some(Err(reason)) => left_out.push(format!("{name}: {reason}")),
            None => left_out.push(format!("{name}: no agent answers")),
        }
    }
    entries.iter_mut().for_each(bound);
    let manifest = manifest(&entries, &left_out);
    let path_error = || format!("cannot write {}: is it there already, or the disk full?", path.display());
    // Tenants' names are in it.
    let file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).with_context(path_error)?;
    let mut archive = Builder::new(GzEncoder::new(file, Compression::default()));
    let listing = Entry { name: "manifest.txt", content: manifest.clone() };
    for entry in [&listing].into_iter().chain(&entries) {
        append(&mut archive, entry).with_context(path_error)?;
    }
    let finished = archive.into_inner().and_then(GzEncoder::finish);
    finished.and_then(|mut file| file.flush()).with_context(path_error)?;
    Ok(manifest)
}

fn append(archive: &mut Builder<GzEncoder<std::fs::File>>, entry: &Entry) -> std::io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_size(entry.content.len() as u64);
    header.set_mode(0o600);
    header.set_mtime(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
    archive.append_data(&mut header, format!("cotenant-bundle/{}", entry.name), entry.content.as_bytes())
}

fn configuration(overrides: &Overrides) -> Result<Option<String>, String> {
    let Some(file) = config::source(overrides) else { return Ok(None) };
    let size = std::fs::metadata(&file).map_err(|error| error.to_string())?.len();
    if size > MAX_CONFIGURATION {
        return Err(format!("it has {size} bytes"));
    }
    let text = std::fs::read_to_string(&file).map_err(|error| error.to_string())?;
    redact::configuration(&text)
        .map(Some)
        .ok_or_else(|| "it is no TOML, so secrets in it cannot be found".to_owned())
}

/// Cuts what is too long at the end of a line.
fn bound(entry: &mut Entry) {
    if entry.content.len() <= MAX_ENTRY {
        return;
    }
    let end = entry.content.as_bytes()[..MAX_ENTRY].iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    let total = entry.content.len();
    entry.content.truncate(end);
    let _ = write!(entry.content, "\n# cut here: {total} bytes in all\n");
}

fn manifest(entries: &[Entry], left_out: &[String]) -> String {
    let mut text = String::from(
        "a bundle of cotenant doctor. Names of tenants, processes and paths of this host are in it. Secrets of the\n\
         configuration, and credentials and queries of URLs, are replaced by REDACTED.\n\nin it:\n",
    );
    for Entry { name, content } in entries {
        let _ = writeln!(text, "  {name} ({} bytes)", content.len());
    }
    if !left_out.is_empty() {
        text.push_str("not in it:\n");
        for line in left_out {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_is_cut_at_a_line_and_says_so() {
        let line = "x".repeat(99) + "\n";
        let mut entry = Entry { name: "metrics.txt", content: line.repeat(MAX_ENTRY / 100 + 10) };
        let total = entry.content.len();
        bound(&mut entry);
        assert!(entry.content.len() < MAX_ENTRY + 100);
        assert!(entry.content.ends_with(&format!("x\n# cut here: {total} bytes in all\n")));
        let mut short = Entry { name: "ready.txt", content: "ready\n".into() };
        bound(&mut short);
        assert_eq!(short.content, "ready\n");
    }
}
