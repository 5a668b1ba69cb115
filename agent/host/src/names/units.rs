//! Owns what systemd's unit files say about a unit, for people.
//! Refuses labels: a description changes with a package update, a tenant must not.

use super::{HostNames, known};
use crate::read;

const MAX_UNIT: u64 = 256 << 10;

impl HostNames {
    /// The unit's `Description=`, a template's with its instance filled in.
    pub fn unit_description(&self, unit: &str) -> Option<String> {
        const PLACES: [&str; 6] = [
            "etc/systemd/system",
            "run/systemd/transient",
            "run/systemd/system",
            "usr/local/lib/systemd/system",
            "usr/lib/systemd/system",
            "lib/systemd/system",
        ];
        if unit.contains('/') {
            return None;
        }
        let (stem, kind) = unit.rsplit_once('.')?;
        let (prefix, instance) = stem.split_once('@').unwrap_or((stem, ""));
        let template = format!("{prefix}@.{kind}");
        let files = [Some(unit), stem.contains('@').then_some(template.as_str())];
        let text = files.into_iter().flatten().find_map(|file| {
            PLACES
                .iter()
                .find_map(|place| read::text(&self.host.path(&format!("{place}/{file}")), MAX_UNIT).ok())
        })?;
        let description = text.lines().find_map(|line| line.trim().strip_prefix("Description="))?;
        known(&description.replace("%i", instance).replace("%I", instance).replace("%n", unit))
    }
}
