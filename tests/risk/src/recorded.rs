//! Owns the recorded runs: real programs on real GPUs, with what they said of themselves.
//! Refuses to name a driver that the tenants' own accounts do not.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use cotenant_model::Tenant;
use cotenant_model::risk::Moment;
use cotenant_model::risk::score::Truth;
use cotenant_recording::{Block, Blocks};
use serde::Deserialize;

/// Which recordings: those that the forecast was tuned on, or the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Set {
    Tuned,
    Unseen,
}

/// One recording, of a GPU or more.
#[derive(Debug)]
pub struct Recording {
    pub name: String,
    pub stories: Vec<Story>,
    pub moments: Vec<Moment>,
}

/// What was played on one GPU.
#[derive(Debug, Deserialize)]
pub struct Story {
    pub name: String,
    pub gpu: String,
    /// `built up`, `no notice` or `nothing`.
    pub meant: String,
    /// Names of who was to fill the GPU.
    pub drivers: Vec<String>,
    /// When their growth began, on the recording's clock; again where they were started again.
    pub began: Vec<f64>,
    pub refusals: Vec<Refusal>,
}

/// A refusal that a program saw as an error.
#[derive(Debug, Deserialize)]
pub struct Refusal {
    /// Seconds on the recording's clock.
    pub at: f64,
    pub tenant: String,
}

#[derive(Deserialize)]
struct Account {
    take: String,
    stories: Vec<Story>,
}

impl Recording {
    /// Who was to fill this story's GPU and since when; nobody where a burst comes without notice.
    pub fn truth(&self, story: &Story) -> Truth {
        let tenants = self.moments.iter().flat_map(|moment| &moment.tenants).map(|of| &of.tenant);
        let driving: BTreeSet<&Tenant> =
            tenants.filter(|tenant| story.drivers.contains(&tenant.name)).collect();
        Truth { drivers: driving.into_iter().cloned().collect(), began: story.began.clone() }
    }
}

impl Set {
    /// Its recordings in the order of their names.
    ///
    /// # Panics
    /// Without the recordings: they are part of this repository.
    pub fn recordings(self) -> Vec<Recording> {
        let set = match self {
            Self::Tuned => "tuned",
            Self::Unseen => "unseen",
        };
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/recorded").join(set);
        let mut files: Vec<PathBuf> = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.expect("an entry").path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "rec"))
            .collect();
        files.sort();
        files.iter().map(|path| read(path)).collect()
    }
}

fn read(path: &Path) -> Recording {
    let file = BufReader::new(File::open(path).expect("a recording"));
    let mut moments = Vec::new();
    for block in Blocks::of(file).expect("a recording") {
        match block.expect("a whole block") {
            Block::Moments(some) => moments.extend(some),
            Block::Start(_) | Block::OtherStart { .. } => panic!("{}: it begins anew", path.display()),
        }
    }
    let account = fs::read(path.with_extension("json")).expect("the truth beside it");
    let Account { take, stories } = serde_json::from_slice(&account).expect("the truth as JSON");
    Recording { name: take, stories, moments }
}
