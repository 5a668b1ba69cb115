//! Owns the rows between tenants: whose waits were whose doing.
//! Refuses process pairs: both ends are tenants, or what stands for one.

use std::time::Duration;

use cotenant_model::view::View;

use super::{Labels, Sheet};
use crate::Id;
use crate::catalogue::attributes::{CULPRIT, RELATION, VICTIM, WAIT_CLASS};

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    sheet.put(Id::AgentBlameFolded, Labels::default(), view.agent.blame_folded);
    for ((victim, culprit, class), share) in &view.blame {
        let labels = Labels::default()
            .with(VICTIM, &victim.name)
            .with(CULPRIT, culprit.as_str())
            .with(RELATION, culprit.relation(victim))
            .with(WAIT_CLASS, class.as_str());
        sheet.put(Id::BlameSeconds, labels, Duration::from_nanos(share.time_ns).as_secs_f64());
    }
}
