//! Owns what the eBPF programs and the agent must agree on: records, map names, cookie bits, tags.
//! Refuses logic beyond packing and unpacking; nothing here reads a host, a clock or a map.
#![no_std]

mod cookie;
mod events;
mod operation;
mod records;
mod symbols;
mod waits;

pub use cookie::{Action, ByteRule, Cookie};
pub use events::*;
pub use operation::{LEDGER_DEVICE_KINDS, MemoryKind, Operation};
pub use records::*;
pub use symbols::{SYMBOLS, Symbol};
pub use waits::*;
