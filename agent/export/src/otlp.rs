//! Owns the way to an OpenTelemetry collector: rows as OTLP metrics, incidents and slow calls as traces, events as logs.
//! Refuses to make anybody wait: what is told is queued or counted as dropped, and a thread of its own does the sending.

mod call;
mod client;
mod context;
mod exemplars;
mod incident;
mod link;
mod points;
mod queue;
mod records;
mod resource;
mod sender;
mod settings;
mod streams;
mod tally;
mod teller;

pub use call::Call;
pub use client::ClientError;
pub use exemplars::Exemplars;
pub(crate) use exemplars::Mark;
pub use points::Histograms;
pub use resource::{Host, Resource};
pub use sender::{Account, Sender, Source, StartError};
pub use settings::{
    Bounds, Compression, Pauses, Protocol, Settings, SettingsError, Signal, Target, Tls, Wishes,
    resource_attributes,
};
pub use streams::Temporality;
pub use teller::{Rates, Teller};
