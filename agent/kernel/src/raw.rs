//! Owns the one claim that shared records are plain bytes.
//! Refuses anything else: records are the abi's, maps are aya's.

/// A shared record as aya wants its keys and values.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Raw<T>(pub(crate) T);

macro_rules! plain {
    ($($record:ty),+ $(,)?) => {
        $(
            // SAFETY: the record is `repr(C)`, `Copy`, of integers only, and its size is asserted to be the sum
            // of its fields in the abi, so that it has no padding and every bit pattern is valid.
            unsafe impl aya::Pod for Raw<$record> {}
        )+
    };
}

plain!(
    u32,
    u64,
    cotenant_abi::Blame,
    cotenant_abi::BlameKey,
    cotenant_abi::CallKey,
    cotenant_abi::Chunk,
    cotenant_abi::Context,
    cotenant_abi::ContextLedger,
    cotenant_abi::ContextLedgerKey,
    cotenant_abi::Effort,
    cotenant_abi::EffortKey,
    cotenant_abi::FailureKey,
    cotenant_abi::Handle,
    cotenant_abi::HostCalls,
    cotenant_abi::Latency,
    cotenant_abi::Ledger,
    cotenant_abi::LedgerKey,
    cotenant_abi::Mapping,
    cotenant_abi::OrdinalKey,
    cotenant_abi::Physical,
    cotenant_abi::Pointer,
    cotenant_abi::PointerKey,
    cotenant_abi::Pool,
    cotenant_abi::PoolKey,
    cotenant_abi::Process,
    cotenant_abi::Recent,
    cotenant_abi::Settings,
    cotenant_abi::Swept,
    cotenant_abi::Thread,
    cotenant_abi::WaitKey,
);
