//! Owns the proof that the eBPF object and the agent lay out their shared records alike.

use std::collections::BTreeMap;

use cotenant_abi::{
    Blame, BlameKey, CallKey, Context, ContextLedger, ContextLedgerKey, Effort, EffortKey, Event, Failed,
    FailureKey, Frame, Handle, Holder, HostCalls, Killed, Latency, Ledger, LedgerKey, Mapping, OrdinalKey,
    Physical, Pointer, PointerKey, Process, Retried, Settings, Slow, Thread, Turn, Turns, Victim, Wait,
    WaitKey,
};
use cotenant_host::btf::{Btf, BtfError};
use object::{Object, ObjectSection};

/// Records that programs reach through pointers. The object has no type for the others: they are copied whole, and
/// their sizes are asserted in the abi.
const TYPED: [&str; 12] = [
    "BlameKey",
    "Frame",
    "HostCalls",
    "Ledger",
    "LedgerKey",
    "Pointer",
    "PointerKey",
    "Settings",
    "Thread",
    "Turn",
    "Turns",
    "Wait",
];

#[test]
fn records_lie_in_the_object_where_the_agent_looks_for_them() {
    let file = object::File::parse(cotenant_kernel::object()).expect("an ELF file");
    let section = file.section_by_name(".BTF").expect("the object has its types");
    let types = Btf::parse(section.data().expect("readable")).expect("BTF");
    let layouts = BTreeMap::from([
        Blame::LAYOUT,
        BlameKey::LAYOUT,
        CallKey::LAYOUT,
        Context::LAYOUT,
        ContextLedger::LAYOUT,
        ContextLedgerKey::LAYOUT,
        Effort::LAYOUT,
        EffortKey::LAYOUT,
        Event::LAYOUT,
        Failed::LAYOUT,
        FailureKey::LAYOUT,
        Frame::LAYOUT,
        Handle::LAYOUT,
        Holder::LAYOUT,
        HostCalls::LAYOUT,
        Killed::LAYOUT,
        Latency::LAYOUT,
        Ledger::LAYOUT,
        LedgerKey::LAYOUT,
        Mapping::LAYOUT,
        OrdinalKey::LAYOUT,
        Physical::LAYOUT,
        Pointer::LAYOUT,
        PointerKey::LAYOUT,
        Process::LAYOUT,
        Retried::LAYOUT,
        Settings::LAYOUT,
        Slow::LAYOUT,
        Thread::LAYOUT,
        Turn::LAYOUT,
        Turns::LAYOUT,
        Victim::LAYOUT,
        Wait::LAYOUT,
        WaitKey::LAYOUT,
    ]);
    let mut wrong = Vec::new();
    for (record, fields) in layouts {
        for (field, offset) in fields {
            let built = types.member_offset(record, field);
            let untyped = built == Err(BtfError::NoStruct) && !TYPED.contains(&record);
            if !untyped && built.as_ref().ok() != u32::try_from(*offset).ok().as_ref() {
                wrong.push(format!("{record}.{field}: {built:?} in the object, {offset} here"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
