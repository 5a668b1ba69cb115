//! Owns how the model's names look in JSON: identities are their published spelling.
//! Refuses reading: nothing here is parsed back.

use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::{Culprit, GpuId, Operation, Tenant, WaitClass};

impl Serialize for GpuId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl Serialize for WaitClass {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The label set: `name`, `kind`, and for Kubernetes `namespace`, `pod`, `container`. Absent keys are not known.
impl Serialize for Tenant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &self.name)?;
        map.serialize_entry("kind", self.kind.as_str())?;
        for (key, value) in
            [("namespace", &self.namespace), ("pod", &self.pod), ("container", &self.container)]
        {
            if let Some(value) = value {
                map.serialize_entry(key, value)?;
            }
        }
        map.end()
    }
}

/// The `culprit` label: a tenant's name, `device`, `kernel` or `unknown`.
impl Serialize for Culprit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// For `serialize_with`: the driver's name of an operation.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
pub(super) fn operation<S: Serializer>(operation: &Operation, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(operation.as_str())
}
