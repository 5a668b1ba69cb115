//! Owns what is published: the metric catalogue, the rows made of a view, and the formats they leave in.
//! Refuses collection: a view comes in, bytes go out. Sockets and clocks are the business of `otlp` alone.

pub mod catalogue;
pub mod guard;
mod label;
pub mod metrics_page;
pub mod otlp;
pub mod prometheus;
pub mod rows;

pub use catalogue::{Attribute, Id, Kind, METRICS, Metric, Stability, Unit};
pub use guard::{Guard, Limits};
pub use metrics_page::metrics_page;
pub use prometheus::{EncodeError, Format, encode, negotiate};
pub use rows::{Distribution, Row, Value, rows};
