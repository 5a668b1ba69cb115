//! Owns what a node is at one moment: identities, samples, ledgers, and how two samples become a view.
//! Refuses IO, clocks and logging: every function is its arguments.

pub mod blame;
pub mod device;
pub mod error;
pub mod excess;
pub mod explain;
pub mod grant;
pub mod idle;
pub mod ids;
pub mod incident;
pub mod kill;
pub mod limit;
pub mod node;
pub mod report;
pub mod risk;
pub mod sample;
pub mod sharing;
pub mod stall;
pub mod tenant;
pub mod verdict;
pub mod view;
pub mod wait;
pub mod xid;

pub use cotenant_abi::{Loss, MemoryKind, Note, Operation};
pub use device::{Absence, DeviceMemory, DeviceSample, GpuProcess, GpuSample, Reading};
pub use error::CudaError;
pub use ids::{GpuId, ProcessId};
pub use node::{Names, Node, Step};
pub use tenant::{Tenant, TenantKind};
pub use wait::{Classes, Culprit, PatternError, WaitClass};
