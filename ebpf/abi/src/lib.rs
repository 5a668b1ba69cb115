//! Owns what the eBPF programs and the agent must agree on: records, map names, cookie bits, tags.
//! Refuses logic beyond packing and unpacking; nothing here reads a host, a clock or a map.
#![no_std]

mod cookie;
mod operation;
mod records;
mod symbols;

pub use cookie::{Action, ByteRule, Cookie};
pub use operation::{MemoryKind, Operation};
pub use records::*;
pub use symbols::{SYMBOLS, Symbol};
