//! Owns what is demanded of published metrics, case by case.
//! Refuses mocks: a view goes in, and real readers (promtool, Python's strict parser, prost) read what comes out.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::float_cmp, reason = "the figures are exact in binary, or made the same way on both sides")]

mod cases;
mod fixture;
mod formats;
mod guard;
mod otlp;
mod readers;
mod speed;
