//! Owns the names of traced driver operations and of the kinds of memory they move.
//! Refuses symbol spelling: `_v2` and `_ptsz` twins are one operation (see `symbols`).

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $value:literal => $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$about])* $variant = $value),+ }

        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The spelling used in labels and attributes.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// Reads the tag back from a record; an unknown tag is not an operation.
            pub const fn from_tag(tag: u8) -> Option<Self> {
                match tag { $($value => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

pub(crate) use named;

named! {
    /// A driver API call, by its name without version or stream suffix.
    Operation {
        Init = 1 => "cuInit",
        DeviceGetUuid = 2 => "cuDeviceGetUuid",
        CtxCreate = 3 => "cuCtxCreate",
        CtxDestroy = 4 => "cuCtxDestroy",
        PrimaryCtxRetain = 5 => "cuDevicePrimaryCtxRetain",
        PrimaryCtxRelease = 6 => "cuDevicePrimaryCtxRelease",
        PrimaryCtxReset = 7 => "cuDevicePrimaryCtxReset",
        CtxSetCurrent = 8 => "cuCtxSetCurrent",
        CtxPushCurrent = 9 => "cuCtxPushCurrent",
        CtxPopCurrent = 10 => "cuCtxPopCurrent",
        MemAlloc = 16 => "cuMemAlloc",
        MemAllocPitch = 17 => "cuMemAllocPitch",
        MemAllocManaged = 18 => "cuMemAllocManaged",
        MemFree = 19 => "cuMemFree",
        MemAllocAsync = 20 => "cuMemAllocAsync",
        MemAllocFromPoolAsync = 21 => "cuMemAllocFromPoolAsync",
        MemFreeAsync = 22 => "cuMemFreeAsync",
        MemPoolCreate = 23 => "cuMemPoolCreate",
        MemPoolDestroy = 24 => "cuMemPoolDestroy",
        MemPoolTrimTo = 25 => "cuMemPoolTrimTo",
        MemPoolSetAttribute = 26 => "cuMemPoolSetAttribute",
        MemPoolImportPointer = 27 => "cuMemPoolImportPointer",
        MemAddressReserve = 32 => "cuMemAddressReserve",
        MemAddressFree = 33 => "cuMemAddressFree",
        MemCreate = 34 => "cuMemCreate",
        MemRelease = 35 => "cuMemRelease",
        MemMap = 36 => "cuMemMap",
        MemUnmap = 37 => "cuMemUnmap",
        MemSetAccess = 38 => "cuMemSetAccess",
        MemRetainAllocationHandle = 39 => "cuMemRetainAllocationHandle",
        MemExportToShareableHandle = 40 => "cuMemExportToShareableHandle",
        MemImportFromShareableHandle = 41 => "cuMemImportFromShareableHandle",
        ArrayCreate = 48 => "cuArrayCreate",
        Array3DCreate = 49 => "cuArray3DCreate",
        ArrayDestroy = 50 => "cuArrayDestroy",
        MipmappedArrayCreate = 51 => "cuMipmappedArrayCreate",
        MipmappedArrayDestroy = 52 => "cuMipmappedArrayDestroy",
        MemHostAlloc = 56 => "cuMemHostAlloc",
        MemAllocHost = 57 => "cuMemAllocHost",
        MemFreeHost = 58 => "cuMemFreeHost",
        MemHostRegister = 59 => "cuMemHostRegister",
        MemHostUnregister = 60 => "cuMemHostUnregister",
        IpcGetMemHandle = 61 => "cuIpcGetMemHandle",
        IpcOpenMemHandle = 62 => "cuIpcOpenMemHandle",
        IpcCloseMemHandle = 63 => "cuIpcCloseMemHandle",
    }
}

named! {
    /// What a ledger entry is made of. Only some kinds take device memory, see [`MemoryKind::is_device`].
    MemoryKind {
        Device = 1 => "device",
        Managed = 2 => "managed",
        Pool = 3 => "pool",
        Vmm = 4 => "vmm",
        Array = 5 => "array",
        HostPinned = 6 => "host_pinned",
        HostRegistered = 7 => "host_registered",
        Imported = 8 => "imported",
    }
}

impl MemoryKind {
    /// True for the kinds whose bytes are physical memory of a GPU, owned by this process.
    pub const fn is_device(self) -> bool {
        matches!(self, Self::Device | Self::Pool | Self::Vmm | Self::Array)
    }

    /// True for the kinds that live in host memory and so carry no GPU.
    pub const fn is_host(self) -> bool {
        matches!(self, Self::HostPinned | Self::HostRegistered)
    }
}

/// Bit `kind` is set when [`MemoryKind::is_device`] holds.
pub const LEDGER_DEVICE_KINDS: u32 = 1 << MemoryKind::Device as u8
    | 1 << MemoryKind::Pool as u8
    | 1 << MemoryKind::Vmm as u8
    | 1 << MemoryKind::Array as u8;
