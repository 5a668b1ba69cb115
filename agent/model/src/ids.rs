//! Owns the identities of processes and GPUs.
//! Refuses ordinals and indexes: a GPU is its UUID, a process is not its PID.

use std::fmt;

/// A process from its first driver call to its death or exec. Never reused, unlike a PID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u64);

/// The exact NVML UUID, `GPU-…` or `MIG-…`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuId(String);

impl GpuId {
    /// The NVML spelling of the 16 bytes that the driver exchanges.
    pub fn from_uuid(bytes: [u8; 16]) -> Self {
        let hex = |range: std::ops::Range<usize>| {
            bytes[range].iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
        };
        Self(format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16)))
    }

    /// NVML's own string, taken as it is.
    pub fn from_nvml(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// The 16 bytes behind a `GPU-…` or new-style `MIG-…` string; `None` for anything else.
    pub fn uuid(&self) -> Option<[u8; 16]> {
        let digits: String = self.0.split_once('-')?.1.chars().filter(|c| *c != '-').collect();
        if digits.len() != 32 || !digits.is_ascii() {
            return None;
        }
        let mut bytes = [0; 16];
        for (byte, at) in bytes.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
        }
        Some(bytes)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GpuId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_round_trips_through_nvml_spelling() {
        let bytes = [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8];
        let id = GpuId::from_uuid(bytes);
        assert_eq!(id.as_str(), "GPU-12345678-9abc-def0-0102-030405060708");
        assert_eq!(id.uuid(), Some(bytes));
        assert_eq!(GpuId::from_nvml("GPU-junk").uuid(), None);
    }
}
