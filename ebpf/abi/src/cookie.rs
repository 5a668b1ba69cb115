//! Owns the 64 bits that travel with each attached probe: what the symbol does and where its arguments are.
//! Refuses meaning beyond packing; the programs interpret it, `symbols` fills it.

use crate::{MemoryKind, Operation};

/// What a symbol does to the ledger when it returns `CUDA_SUCCESS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Action {
    /// Counted and timed, moves nothing.
    Count = 0,
    /// A pointer comes to life: `out` says where it is written.
    Allocate = 1,
    /// The pointer in argument `out` dies.
    Free = 2,
    /// A physical handle comes to life.
    HandleCreate = 3,
    HandleRelease = 4,
    HandleRetain = 5,
    HandleImport = 6,
    Map = 7,
    Unmap = 8,
    ContextCreate = 9,
    ContextDestroy = 10,
    PrimaryRetain = 11,
    PrimaryRelease = 12,
    PrimaryReset = 13,
    ContextSet = 14,
    ContextPush = 15,
    ContextPop = 16,
    DeviceUuid = 17,
}

/// How the size of an allocation is found among the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ByteRule {
    /// Nothing is sized here.
    None = 0,
    /// Argument `size` is a 64-bit byte count.
    Argument = 1,
    /// Argument `size` is a 32-bit byte count (API version 1).
    Argument32 = 2,
    /// `*arg1` (pitch, written by the driver) times `arg3` (height).
    Pitch = 3,
    /// `CUDA_ARRAY_DESCRIPTOR` at argument `size`.
    Array2D = 4,
    /// `CUDA_ARRAY3D_DESCRIPTOR` at argument `size`.
    Array3D = 5,
    /// `CUDA_ARRAY3D_DESCRIPTOR` at argument `size`, levels in argument 2.
    Mipmapped = 6,
    /// The size is what the driver maps during the call (imports say no size).
    Mapped = 7,
}

/// Packed description of one attachment.
///
/// Bits: 0-7 operation, 8-15 action, 16-23 memory kind (0 none), 24-27 byte rule, 28-31 size argument,
/// 32-35 out argument, 36 out is 32 bits wide or held by value, 40-63 library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Cookie(pub u64);

impl Cookie {
    pub const LIBRARY_SHIFT: u32 = 40;
    /// Library ids wrap here; the agent never has that many files attached at once.
    pub const LIBRARY_MAX: u32 = (1 << 24) - 1;

    #[allow(clippy::too_many_arguments, reason = "a packing function names every field once")]
    pub const fn pack(
        operation: Operation,
        action: Action,
        kind: Option<MemoryKind>,
        rule: ByteRule,
        size: u8,
        out: u8,
        narrow: bool,
    ) -> Self {
        let kind = match kind {
            Some(kind) => kind as u64,
            None => 0,
        };
        Self(
            operation as u64
                | (action as u64) << 8
                | kind << 16
                | (rule as u64) << 24
                | ((size & 15) as u64) << 28
                | ((out & 15) as u64) << 32
                | (narrow as u64) << 36,
        )
    }

    /// The same symbol in one particular library file.
    #[must_use]
    pub const fn in_library(self, library: u32) -> Self {
        Self(self.0 & ((1 << Self::LIBRARY_SHIFT) - 1) | (library as u64) << Self::LIBRARY_SHIFT)
    }

    pub const fn operation(self) -> u8 {
        self.0 as u8
    }
    pub const fn action(self) -> u8 {
        (self.0 >> 8) as u8
    }
    pub const fn kind(self) -> u8 {
        (self.0 >> 16) as u8
    }
    pub const fn rule(self) -> u8 {
        (self.0 >> 24) as u8 & 15
    }
    pub const fn size(self) -> usize {
        (self.0 >> 28) as usize & 15
    }
    pub const fn out(self) -> usize {
        (self.0 >> 32) as usize & 15
    }
    pub const fn narrow(self) -> bool {
        self.0 >> 36 & 1 == 1
    }
    pub const fn library(self) -> u32 {
        (self.0 >> Self::LIBRARY_SHIFT) as u32
    }
    /// The part that says which symbol it is, whatever the library.
    pub const fn symbol(self) -> u64 {
        self.0 & ((1 << Self::LIBRARY_SHIFT) - 1)
    }
}
