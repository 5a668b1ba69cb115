//! Owns the eBPF object: one module per capability, thin program functions over `try_*`.
//! Refuses per-call records and any decision that user space can take later.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod allocations;
mod atomic;
mod boundary;
mod calls;
mod contexts;
mod effort;
mod faults;
mod kills;
mod ledger;
mod lifecycle;
mod maps;
mod physical;
mod pools;
mod quota;
mod recent;
mod reports;
mod waits;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
