//! Owns `cotenant explain --quota`: how much memory each tenant needs by what was measured, and which MIG profile holds it.
//! Refuses to know what no measurement shows: a tenant that still grows has no quota yet, and that is said.

use std::fmt::Write;

use cotenant_model::risk::quota::{CONTEXT, Profile, STEP, profiles};
use serde::Deserialize;

const MIB: u64 = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;
/// The place of the five minutes among the horizons.
const FAR: usize = 2;
/// Growth below this, in bytes per second, is none: 64 MiB a minute.
const STILL: f64 = 64.0 * MIB as f64 / 60.0;

/// What `/api/v1/risk` says, as far as it is read here.
#[derive(Deserialize)]
struct Answer {
    gpus: Vec<Gpu>,
}

#[derive(Deserialize)]
struct Gpu {
    #[serde(rename = "gpu")]
    id: String,
    headroom: Room,
    tenants: Vec<Resident>,
}

#[derive(Deserialize)]
struct Room {
    limit: u64,
}

#[derive(Deserialize)]
struct Resident {
    tenant: Name,
    live: u64,
    peak: u64,
    rate: f64,
    growth: Vec<Growth>,
    need: u64,
    quota: u64,
}

#[derive(Deserialize)]
struct Name {
    name: String,
}

#[derive(Deserialize)]
struct Growth {
    p99: u64,
}

impl Resident {
    /// What is passed once in a hundred in five minutes.
    fn expected(&self) -> u64 {
        self.live + self.growth.get(FAR).map_or(0, |growth| growth.p99)
    }
}

/// The answer in words, of one tenant or of all.
pub(super) fn words(text: &str, tenant: Option<&str>) -> Result<String, serde_json::Error> {
    let answer: Answer = serde_json::from_str(text)?;
    let mut said = String::new();
    for gpu in &answer.gpus {
        let cuts = profiles(gpu.headroom.limit);
        for need in gpu.tenants.iter().filter(|of| tenant.is_none_or(|name| of.tenant.name == name)) {
            tell(&mut said, gpu, need, &cuts);
        }
    }
    if said.is_empty() {
        said.push_str(match tenant {
            Some(_) => "this tenant holds no memory on a GPU that the agent has watched for half a minute",
            None => "nobody holds memory on a GPU that the agent has watched for half a minute",
        });
    }
    Ok(said)
}

fn tell(said: &mut String, gpu: &Gpu, of: &Resident, cuts: &[Profile]) {
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / GIB);
    let quota = of.quota;
    let _ = writeln!(said, "{} on {}: {}", of.tenant.name, gpu.id, gib(quota));
    let _ = writeln!(
        said,
        "  its peak since the agent came was {}, it holds {}, and in five minutes it passes {} once in a hundred; with {} for a \
         process's context, in steps of {}",
        gib(of.peak),
        gib(of.live),
        gib(of.expected()),
        gib(CONTEXT),
        gib(STEP),
    );
    if quota < of.need {
        let _ = writeln!(
            said,
            "  that would be {}, but there is not so much for all of them: who grows gives it up",
            gib(of.need),
        );
    } else if of.rate > STILL {
        let _ = writeln!(
            said,
            "  it still grows, by {} a minute: this is what it needs for the next five minutes, not where it ends",
            gib(rate(of.rate * 60.0)),
        );
    }
    let fitting = cuts.iter().filter(|cut| cut.bytes >= quota);
    let Some(least) = fitting.clone().map(|cut| cut.bytes).min() else {
        if !cuts.is_empty() {
            said.push_str("  no MIG profile of this GPU holds it for sure\n");
        }
        return;
    };
    let names: Vec<&str> = fitting.filter(|cut| cut.bytes == least).map(|cut| cut.name.as_str()).collect();
    let _ = writeln!(
        said,
        "  MIG, if this GPU has it: {} ({} or more; by the GPU's size and NVIDIA's MIG User Guide, see nvidia-smi mig -lgip)",
        names.join(" or "),
        gib(least),
    );
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, not below zero")]
fn rate(bytes: f64) -> u64 {
    bytes.max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(limit: u64, peak_gib: u64, rate: f64) -> String {
        capped(limit, peak_gib, rate, u64::MAX)
    }

    fn capped(limit: u64, peak_gib: u64, rate: f64, cap: u64) -> String {
        let (peak, live, p99) = (peak_gib << 30, (peak_gib - 1) << 30, MIB);
        let need = peak + 3 * STEP;
        let quota = need.min(cap);
        format!(
            "{{\"gpus\":[{{\"gpu\":\"GPU-a\",\"headroom\":{{\"limit\":{limit}}},\"tenants\":[{{\"tenant\":{{\"name\":\"pod:ml/chat\"}},\
             \"live\":{live},\"peak\":{peak},\"rate\":{rate},\"growth\":[{{\"p99\":0}},{{\"p99\":0}},{{\"p99\":{p99}}}],\"need\":{need},\"quota\":{quota}}}]}}]}}"
        )
    }

    #[test]
    fn a_quota_has_its_reasons_and_the_smallest_profile_that_holds_it() {
        let said = words(&answer(143_771 * MIB, 20, 0.0), None).unwrap();
        assert!(said.starts_with("pod:ml/chat on GPU-a: 20.75 GiB\n"), "{said}");
        assert!(said.contains("its peak since the agent came was 20.00 GiB"), "{said}");
        assert!(said.contains("1g.35gb or 2g.35gb"), "{said}");
        assert!(!said.contains("still grows"), "{said}");
    }

    #[test]
    fn who_is_to_give_something_up_is_told_what_it_would_have_needed() {
        let said = words(&capped(143_771 * MIB, 60, 1e8, 40 << 30), None).unwrap();
        assert!(said.starts_with("pod:ml/chat on GPU-a: 40.00 GiB\n"), "{said}");
        assert!(said.contains("that would be 60.75 GiB, but there is not so much for all of them"), "{said}");
    }

    #[test]
    fn who_still_grows_is_told_that_this_is_not_the_end() {
        let said = words(&answer(143_771 * MIB, 20, 1e8), Some("pod:ml/chat")).unwrap();
        assert!(said.contains("still grows, by 5.59 GiB a minute"), "{said}");
        assert!(words(&answer(143_771 * MIB, 20, 1e8), Some("pod:ml/other")).unwrap().contains("no memory"));
    }

    #[test]
    fn what_no_profile_holds_is_said() {
        let said = words(&answer(143_771 * MIB, 135, 0.0), None).unwrap();
        assert!(said.contains("no MIG profile"), "{said}");
        assert!(!words(&answer(24_576 * MIB, 20, 0.0), None).unwrap().contains("MIG"));
    }
}
