//! Owns runs to forecast on: scenarios, drawn from seeds, with who drives them.
//! Refuses to stand for real runs: these were written by whoever wrote the forecast, and say so.

mod chance;
mod limit;
mod recorded;
mod report;
mod scenario;
mod tenant;
mod world;

pub use chance::Chance;
pub use limit::{BOUNDED, Bounded};
pub use recorded::{Recording, Refusal, Set, Story};
pub use report::Scores;
pub use scenario::{Run, SCENARIOS, Scenario, TUNED_ON, UNSEEN};
pub use tenant::{Actor, Behaviour, Extra, GIB, MIB};
pub use world::{LIMIT, World};
