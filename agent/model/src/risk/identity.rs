//! Owns how tenants and GPUs are written into recordings: whole, so that they come back equal.
//! Refuses the short form that answers to people have: nothing there is read back.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{GpuId, Tenant, TenantKind};

#[derive(Serialize, Deserialize)]
struct Whole<'a> {
    name: std::borrow::Cow<'a, str>,
    kind: TenantKind,
    namespace: Option<String>,
    pod: Option<String>,
    container: Option<String>,
}

pub(super) mod tenant {
    use super::{Deserialize, Deserializer, Serialize, Serializer, Tenant, Whole};

    pub(in super::super) fn serialize<S: Serializer>(of: &Tenant, to: S) -> Result<S::Ok, S::Error> {
        Whole::from(of).serialize(to)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Tenant, D::Error> {
        Whole::deserialize(from).map(Tenant::from)
    }
}

pub(super) mod gpu {
    use super::{Deserialize, Deserializer, GpuId, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(of: &GpuId, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(of.as_str())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<GpuId, D::Error> {
        String::deserialize(from).map(|text| GpuId::from_nvml(&text))
    }
}

/// A key that is written whole.
trait Key: Ord + Sized {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error>;
    fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Self, D::Error>;
}

impl Key for Tenant {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        tenant::serialize(self, to)
    }

    fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        tenant::deserialize(from)
    }
}

impl Key for GpuId {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        gpu::serialize(self, to)
    }

    fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        gpu::deserialize(from)
    }
}

struct Written<'a, K>(&'a K);

impl<K: Key> Serialize for Written<'_, K> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.write(to)
    }
}

struct Read<K>(K);

impl<'de, K: Key> Deserialize<'de> for Read<K> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        K::read(from).map(Read)
    }
}

pub(super) mod map {
    use super::{
        BTreeMap, Deserialize, Deserializer, Entries, Key, Serialize, SerializeMap, Serializer, Written,
    };

    #[allow(private_bounds, reason = "the keys are the two above")]
    pub(in super::super) fn serialize<K: Key, V: Serialize, S: Serializer>(
        of: &BTreeMap<K, V>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(of.len()))?;
        for (key, value) in of {
            map.serialize_entry(&Written(key), value)?;
        }
        map.end()
    }

    #[allow(private_bounds, reason = "the keys are the two above")]
    pub(in super::super) fn deserialize<'de, K: Key, V: Deserialize<'de>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<BTreeMap<K, V>, D::Error> {
        from.deserialize_map(Entries(std::marker::PhantomData))
    }
}

struct Entries<K, V>(std::marker::PhantomData<(K, V)>);

impl<'de, K: Key, V: Deserialize<'de>> Visitor<'de> for Entries<K, V> {
    type Value = BTreeMap<K, V>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a map by tenant or GPU")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((Read(key), value)) = entries.next_entry::<Read<K>, V>()? {
            map.insert(key, value);
        }
        Ok(map)
    }
}

impl<'a> From<&'a Tenant> for Whole<'a> {
    fn from(of: &'a Tenant) -> Self {
        Self {
            name: of.name.as_str().into(),
            kind: of.kind,
            namespace: of.namespace.clone(),
            pod: of.pod.clone(),
            container: of.container.clone(),
        }
    }
}

impl From<Whole<'_>> for Tenant {
    fn from(of: Whole<'_>) -> Self {
        Self {
            name: of.name.into_owned(),
            kind: of.kind,
            namespace: of.namespace,
            pod: of.pod,
            container: of.container,
        }
    }
}
