//! Owns the ids of traces and spans, and small attribute shapes: an incident has the same ids whenever it is told.
//! Refuses chance: an id is a hash of what it names and of the node, so that no two nodes share one.

use cotenant_model::Tenant;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::span::Link;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use ring::digest::{SHA256, digest};

use super::resource::{attribute, text};
use super::sender::nanoseconds;
use crate::Attribute;
use crate::catalogue::attributes::{CONTAINER, NAMESPACE, POD, TENANT, TENANT_KIND};
use crate::label::clean;

/// W3C "sampled", and "it is known that the parent is not remote" of OTLP.
pub(super) const FLAGS: u32 = 0x101;

/// A span's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) trace: [u8; 16],
    pub(super) span: [u8; 8],
}

impl Context {
    /// The root span of what `names` names.
    pub(super) fn of(seed: &str, kind: &str, name: &str) -> Self {
        let hash = digest(&SHA256, format!("{seed}\0{kind}\0{name}").as_bytes());
        let (mut trace, mut span) = ([0; 16], [0; 8]);
        trace.copy_from_slice(&hash.as_ref()[..16]);
        span.copy_from_slice(&hash.as_ref()[16..24]);
        Self { trace, span }
    }

    /// A span below this one.
    pub(super) fn child(&self, name: &str) -> Self {
        let mut text = self.trace.to_vec();
        text.extend(name.as_bytes());
        let mut span = [0; 8];
        span.copy_from_slice(&digest(&SHA256, &text).as_ref()[..8]);
        Self { trace: self.trace, span }
    }

    pub(super) fn link(&self, attributes: Vec<KeyValue>) -> Link {
        Link {
            trace_id: self.trace.to_vec(),
            span_id: self.span.to_vec(),
            attributes,
            flags: FLAGS,
            ..Link::default()
        }
    }

    /// A span of the agent's own view: it does nothing for anybody, so its kind is internal.
    pub(super) fn span(&self, parent: Option<&Self>, name: &str, from_unix: f64, to_unix: f64) -> Span {
        use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
        let start = nanoseconds(from_unix);
        Span {
            trace_id: self.trace.to_vec(),
            span_id: self.span.to_vec(),
            parent_span_id: parent.map(|parent| parent.span.to_vec()).unwrap_or_default(),
            flags: FLAGS,
            name: name.to_owned(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: start,
            end_time_unix_nano: nanoseconds(to_unix).max(start),
            ..Span::default()
        }
    }
}

pub(super) fn failed(words: &str) -> Status {
    use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
    Status { message: words.to_owned(), code: StatusCode::Error.into() }
}

/// Links of one span, and how many found no room among them.
#[derive(Clone, Debug, Default)]
pub(super) struct Links {
    listed: Vec<Link>,
    dropped: u32,
}

impl Links {
    pub(super) fn of(all: impl Iterator<Item = Link>, most: usize) -> Self {
        let mut links = Self::default();
        for link in all {
            if links.listed.len() < most {
                links.listed.push(link);
            } else {
                links.dropped += 1;
            }
        }
        links
    }

    pub(super) fn add(&mut self, other: Self) {
        self.listed.extend(other.listed);
        self.dropped += other.dropped;
    }

    pub(super) fn hang_on(&self, span: &mut Span) {
        span.links.extend_from_slice(&self.listed);
        span.dropped_links_count += self.dropped;
    }
}

/// A list that leaves out what is not known.
#[derive(Clone, Debug, Default)]
pub(super) struct Attributes(pub(super) Vec<KeyValue>);

impl Attributes {
    /// Text may come from a tenant: it is cleaned as labels are.
    pub(super) fn text(mut self, key: &str, value: &str) -> Self {
        if !value.is_empty() {
            self.0.push(text(key, &clean(value)));
        }
        self
    }

    /// Words of our own, which are longer than a label may be.
    pub(super) fn words(mut self, key: &str, value: &str) -> Self {
        self.0.push(text(key, value));
        self
    }

    pub(super) fn named(self, attribute: Attribute, value: &str) -> Self {
        self.text(attribute.otel, value)
    }

    pub(super) fn number(mut self, key: &str, value: Option<f64>) -> Self {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            // A sum of nothing is minus zero.
            self.0.push(attribute(key, Value::DoubleValue(value + 0.0)));
        }
        self
    }

    pub(super) fn count(mut self, key: &str, value: Option<u64>) -> Self {
        if let Some(value) = value {
            self.0.push(attribute(key, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX))));
        }
        self
    }

    pub(super) fn bytes(mut self, key: &str, value: Option<i64>) -> Self {
        if let Some(value) = value {
            self.0.push(attribute(key, Value::IntValue(value)));
        }
        self
    }

    pub(super) fn truth(mut self, key: &str, value: bool) -> Self {
        self.0.push(attribute(key, Value::BoolValue(value)));
        self
    }

    pub(super) fn list<'a>(mut self, key: &str, values: impl Iterator<Item = &'a str>) -> Self {
        let text = |value: &str| AnyValue { value: Some(Value::StringValue(clean(value).into_owned())) };
        let values: Vec<AnyValue> = values.map(text).collect();
        if !values.is_empty() {
            self.0.push(attribute(key, Value::ArrayValue(ArrayValue { values })));
        }
        self
    }

    /// The attributes that a tenant has on metrics too.
    pub(super) fn tenant(self, tenant: &Tenant) -> Self {
        self.named(TENANT, &tenant.name)
            .named(TENANT_KIND, tenant.kind.as_str())
            .named(NAMESPACE, tenant.namespace.as_deref().unwrap_or_default())
            .named(POD, tenant.pod.as_deref().unwrap_or_default())
            .named(CONTAINER, tenant.container.as_deref().unwrap_or_default())
    }
}
