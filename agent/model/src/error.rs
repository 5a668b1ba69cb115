//! Owns the names of driver return codes.
//! Refuses judgement: which code is a failure of whom is the reader's question, except `is_failure`.

/// A non-zero `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaError(pub u32);

impl CudaError {
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const DEINITIALIZED: Self = Self(4);

    /// `error.type`: the `cuda.h` name, or `other` so that the set stays bounded.
    pub const fn name(self) -> &'static str {
        match self.0 {
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            34 => "CUDA_ERROR_STUB_LIBRARY",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            100 => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            400 => "CUDA_ERROR_INVALID_HANDLE",
            401 => "CUDA_ERROR_ILLEGAL_STATE",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
            709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            711 => "CUDA_ERROR_TOO_MANY_PEERS",
            712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            805 => "CUDA_ERROR_MPS_CONNECTION_FAILED",
            807 => "CUDA_ERROR_MPS_SERVER_NOT_READY",
            999 => "CUDA_ERROR_UNKNOWN",
            _ => "other",
        }
    }

    /// `CUDA_ERROR_DEINITIALIZED` is how every program's exit looks, not a failure (facts: seen at every exit).
    pub const fn is_failure(self) -> bool {
        self.0 != Self::DEINITIALIZED.0
    }
}
