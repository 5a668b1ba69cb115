//! Owns `cotenant explain --quota`: how much memory each tenant needs by what was measured, and which MIG profile holds it.
//! Refuses to know what no measurement shows: a tenant that still grows has no quota yet, and that is said.

use std::fmt::Write;

use serde::Deserialize;

const MIB: u64 = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;
/// A process's context and modules, which no ledger has: 430 to 600 MiB on an H200 with CUDA 13.
const CONTEXT: u64 = 600 * MIB;
/// Quotas are rounded up to this.
const STEP: u64 = 256 * MIB;
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
    tenants: Vec<Need>,
}

#[derive(Deserialize)]
struct Room {
    limit: u64,
}

#[derive(Deserialize)]
struct Need {
    tenant: Name,
    live: u64,
    peak: u64,
    rate: f64,
    growth: Vec<Growth>,
}

#[derive(Deserialize)]
struct Name {
    name: String,
}

#[derive(Deserialize)]
struct Growth {
    p99: u64,
}

impl Need {
    /// The highest of what was held and of what is to be expected within five minutes, with the context, rounded up.
    fn quota(&self) -> u64 {
        (self.peak.max(self.expected()) + CONTEXT).div_ceil(STEP) * STEP
    }

    /// What is passed once in a hundred in five minutes.
    fn expected(&self) -> u64 {
        self.live + self.growth.get(FAR).map_or(0, |growth| growth.p99)
    }
}

/// One cut of a GPU: its name, and the bytes that an instance of it is sure to have.
#[derive(Debug, PartialEq, Eq)]
struct Profile {
    name: String,
    bytes: u64,
}

/// The MIG profiles of a GPU of this size, smallest first; none where no GPU of it has MIG.
///
/// By NVIDIA's MIG User Guide ("Supported MIG Profiles"): memory is cut into eighths, and a profile has one, two, four or
/// eight. Its name has the product's gigabytes over its part, rounded. An instance has up to a tenth less than its part
/// (an H200's 1g.18gb has 16.0 of 17.5 GiB), so a tenth is taken off.
fn profiles(limit: u64) -> Vec<Profile> {
    let product = limit.div_ceil(1 << 30);
    // A100 and its kind, H100, H100 NVL, GH200, H200, B200. An A30 has quarters, and is left out.
    if ![40, 80, 94, 96, 141, 144, 180].contains(&product) {
        return Vec::new();
    }
    let cuts = [("1g", 1), ("1g", 2), ("2g", 2), ("3g", 4), ("4g", 4), ("7g", 8)];
    let of = |(slices, eighths): (&str, u64)| Profile {
        name: format!("{slices}.{}gb", (product * eighths * 2 + 8) / 16),
        bytes: limit / 8 * eighths / 10 * 9,
    };
    cuts.into_iter().map(of).collect()
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

fn tell(said: &mut String, gpu: &Gpu, need: &Need, cuts: &[Profile]) {
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / GIB);
    let quota = need.quota();
    let _ = writeln!(said, "{} on {}: {}", need.tenant.name, gpu.id, gib(quota));
    let _ = writeln!(
        said,
        "  its peak since the agent came was {}, it holds {}, and in five minutes it passes {} once in a hundred; with {} for a \
         process's context, in steps of {}",
        gib(need.peak),
        gib(need.live),
        gib(need.expected()),
        gib(CONTEXT),
        gib(STEP),
    );
    if need.rate > STILL {
        let _ = writeln!(
            said,
            "  it still grows, by {} a minute: this is what it needs for the next five minutes, not where it ends",
            gib(rate(need.rate * 60.0)),
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
        let (peak, live, p99) = (peak_gib << 30, (peak_gib - 1) << 30, MIB);
        format!(
            "{{\"gpus\":[{{\"gpu\":\"GPU-a\",\"headroom\":{{\"limit\":{limit}}},\"tenants\":[{{\"tenant\":{{\"name\":\"pod:ml/chat\"}},\
             \"live\":{live},\"peak\":{peak},\"rate\":{rate},\"growth\":[{{\"p99\":0}},{{\"p99\":0}},{{\"p99\":{p99}}}]}}]}}]}}"
        )
    }

    #[test]
    fn profiles_have_the_names_that_nvidia_gave_them() {
        let names =
            |mib: u64| profiles(mib * MIB).into_iter().map(|cut| cut.name).collect::<Vec<_>>().join(" ");
        assert_eq!(names(143_771), "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb");
        assert_eq!(names(81_559), "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb");
        assert_eq!(names(40_536), "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb");
        assert_eq!(names(24_576), "");
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
