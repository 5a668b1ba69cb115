//! Owns who speaks: the attributes of the agent's OTLP resource.
//! Refuses tenants: they are attributes of what is said about them (see the journal, 2026-11-30-otlp-tenants).

use std::collections::BTreeMap;

use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::resource::v1::Resource as Message;
use ring::digest::{SHA256, digest};

/// The machine, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    pub name: Option<String>,
    /// `/etc/machine-id` or what the cloud calls it.
    pub id: Option<String>,
    /// The Kubernetes node.
    pub node: Option<String>,
}

/// Attributes of everything that one agent sends. Unknown ones are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    attributes: BTreeMap<String, String>,
    version: &'static str,
}

impl Resource {
    /// `extra` is `OTEL_RESOURCE_ATTRIBUTES`, which goes over what was found out.
    pub fn new(host: Host, version: &'static str, extra: BTreeMap<String, String>) -> Self {
        let instance = host.id.as_ref().or(host.name.as_ref()).map(|host| instance(host));
        let found = [
            ("service.name", Some("cotenant".to_owned())),
            ("service.version", Some(version.to_owned())),
            ("service.instance.id", instance),
            ("host.name", host.name),
            ("host.id", host.id),
            ("k8s.node.name", host.node),
        ];
        let mut attributes: BTreeMap<String, String> = found
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value.filter(|value| !value.is_empty())?)))
            .collect();
        attributes.extend(extra.into_iter().filter(|(_, value)| !value.is_empty()));
        Self { attributes, version }
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.attributes.get(key).map(String::as_str)
    }

    /// What tells this node's ids from another's.
    pub(super) fn seed(&self) -> &str {
        ["service.instance.id", "host.id", "host.name"].iter().find_map(|key| self.get(key)).unwrap_or("")
    }

    pub(super) fn message(&self) -> Message {
        let attributes = self.attributes.iter().map(|(key, value)| text(key, value)).collect();
        Message { attributes, ..Message::default() }
    }

    pub(super) fn scope(&self) -> InstrumentationScope {
        InstrumentationScope {
            name: "cotenant".to_owned(),
            version: self.version.to_owned(),
            ..InstrumentationScope::default()
        }
    }
}

/// A UUID that is the same after a restart: there is one agent a host, and a new id at each start would be a new
/// `instance` in every back-end.
fn instance(host: &str) -> String {
    let hash = digest(&SHA256, format!("cotenant/{host}").as_bytes());
    let mut bytes = [0_u8; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    // Version 8 (own scheme) of RFC 9562.
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

pub(super) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, any_value::Value::StringValue(value.to_owned()))
}

pub(super) fn attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_not_there() {
        let resource = Resource::new(Host::default(), "0.1.0", BTreeMap::new());
        assert_eq!(resource.get("service.name"), Some("cotenant"));
        for absent in ["host.name", "host.id", "k8s.node.name", "service.instance.id"] {
            assert_eq!(resource.get(absent), None, "{absent}");
        }
    }

    #[test]
    fn an_instance_is_the_same_after_a_restart_and_no_other_host_has_it() {
        let of = |id: &str| {
            let host = Host { id: Some(id.to_owned()), ..Host::default() };
            Resource::new(host, "0.1.0", BTreeMap::new()).get("service.instance.id").map(str::to_owned)
        };
        assert_eq!(of("a"), of("a"));
        assert_ne!(of("a"), of("b"));
        assert_eq!(of("a").map(|id| id.len()), Some(36));
    }

    #[test]
    fn the_environment_has_the_last_word() {
        let extra = [("service.name", "gpu-watch"), ("deployment.environment.name", "prod"), ("host.id", "")];
        let extra = extra.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let host = Host { id: Some("m".to_owned()), ..Host::default() };
        let resource = Resource::new(host, "0.1.0", extra);
        assert_eq!(resource.get("service.name"), Some("gpu-watch"));
        assert_eq!(resource.get("deployment.environment.name"), Some("prod"));
        assert_eq!(resource.get("host.id"), Some("m"));
    }
}
