//! Owns what the API server's bytes say: a page of pods, and the events of a watch, as lines.
//! Refuses the network and trust: every length is bounded, and what a pod's owner wrote is kept as text only.

use std::collections::BTreeMap;

use serde::Deserialize;

/// One object is at most 1.5 MiB in etcd; an event that is longer is none of ours.
pub(super) const MAX_LINE: usize = 4 << 20;
/// Of the server's own words in an error.
const MAX_WORDS: usize = 300;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("the API server's list of pods is not what Kubernetes sends; is api_server the API server?")]
    List(#[source] serde_json::Error),
    #[error("an event of the watch is not what Kubernetes sends; the list is asked for again")]
    Event(#[source] serde_json::Error),
    #[error("an event of the watch is longer than {MAX_LINE} bytes; the list is asked for again")]
    TooLong,
}

/// What is read of a pod: who it is, and what its owner says of it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) resource_version: String,
    pub(super) labels: Option<BTreeMap<String, String>>,
    pub(super) annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
struct Object {
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMetadata {
    resource_version: String,
    #[serde(rename = "continue")]
    more: String,
}

#[derive(Debug, Deserialize)]
struct List {
    metadata: ListMetadata,
    // Null for an empty list in some servers.
    items: Option<Vec<Object>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) pods: Vec<Metadata>,
    /// From where the watch goes on.
    pub(super) version: String,
    /// What asks for the next page; empty on the last.
    pub(super) more: String,
}

pub(super) fn page(bytes: &[u8]) -> Result<Page, DecodeError> {
    let List { metadata, items } = serde_json::from_slice(bytes).map_err(DecodeError::List)?;
    let pods = items.unwrap_or_default().into_iter().map(|object| object.metadata).collect();
    Ok(Page { pods, version: metadata.resource_version, more: metadata.more })
}

/// One line of a watch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// It is there, new or changed.
    Is(Metadata),
    Gone(Metadata),
    /// Nothing happened up to this version.
    Bookmark(String),
    /// The server ends the watch, with a code of HTTP and its words.
    Error(u16, String),
    /// A kind that is not known here.
    Other,
}

#[derive(Deserialize)]
struct Tag {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct Tagged<T> {
    object: T,
}

pub(super) fn event(line: &[u8]) -> Result<Event, DecodeError> {
    let Tag { kind } = serde_json::from_slice(line).map_err(DecodeError::Event)?;
    Ok(match kind.as_str() {
        "ADDED" | "MODIFIED" => Event::Is(object::<Object>(line)?.metadata),
        "DELETED" => Event::Gone(object::<Object>(line)?.metadata),
        "BOOKMARK" => Event::Bookmark(object::<Object>(line)?.metadata.resource_version),
        "ERROR" => {
            let Status { code, message } = object(line)?;
            Event::Error(code.unwrap_or(500), shown(&message))
        }
        _ => Event::Other,
    })
}

fn object<'a, T: Deserialize<'a>>(line: &'a [u8]) -> Result<T, DecodeError> {
    Ok(serde_json::from_slice::<Tagged<T>>(line).map_err(DecodeError::Event)?.object)
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    code: Option<u16>,
    message: String,
}

/// The code and the words of a `Status`, or of whatever came instead of one.
pub(super) fn status(bytes: &[u8]) -> (Option<u16>, String) {
    match serde_json::from_slice::<Status>(bytes) {
        Ok(Status { code, message }) => (code, shown(&message)),
        Err(_) => (None, shown(&String::from_utf8_lossy(bytes))),
    }
}

fn shown(words: &str) -> String {
    let mut words = crate::names::escape(words.trim());
    words.truncate(words.floor_char_boundary(MAX_WORDS));
    words
}

/// Bytes as they come, cut into lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that these bytes complete.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, DecodeError> {
        let mut lines = Vec::new();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.rest.len() + part.len() > MAX_LINE {
                return Err(DecodeError::TooLong);
            }
            self.rest.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.rest);
                if !line.trim_ascii().is_empty() {
                    lines.push(line);
                }
            }
        }
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";

    #[test]
    fn a_page_has_pods_and_where_to_go_on() {
        let text = format!(
            r#"{{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1",
                "metadata":{{"resourceVersion":"77","continue":"next","remainingItemCount":3}},
                "items":[{{"metadata":{{"name":"a","namespace":"n","uid":"{UID}","resourceVersion":"5",
                    "labels":{{"team":"x"}},"annotations":null,"managedFields":[{{"manager":"k"}}]}},
                    "spec":{{"nodeName":"m"}}}}]}}"#
        );
        let page = page(text.as_bytes()).unwrap();
        assert_eq!((page.version.as_str(), page.more.as_str(), page.pods.len()), ("77", "next", 1));
        let pod = &page.pods[0];
        assert_eq!((pod.uid.as_str(), pod.namespace.as_str(), pod.name.as_str()), (UID, "n", "a"));
        assert_eq!(pod.labels.as_ref().unwrap()["team"], "x");
        assert_eq!(pod.annotations, None);
    }

    #[test]
    fn an_empty_list_is_a_list_and_a_web_page_is_none() {
        let empty = page(br#"{"metadata":{"resourceVersion":"1"},"items":null}"#).unwrap();
        assert!(empty.pods.is_empty() && empty.more.is_empty());
        for wrong in ["<html>", "{}", "[]", "", r#"{"metadata":{},"items":[{"metadata":{"labels":[1]}}]}"#] {
            assert!(page(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn events_are_told_apart() {
        let of =
            |kind: &str, object: &str| event(format!(r#"{{"type":"{kind}","object":{object}}}"#).as_bytes());
        let pod = format!(r#"{{"metadata":{{"uid":"{UID}","name":"a","resourceVersion":"9"}}}}"#);
        assert!(matches!(of("ADDED", &pod).unwrap(), Event::Is(pod) if pod.uid == UID));
        assert!(matches!(of("MODIFIED", &pod).unwrap(), Event::Is(_)));
        assert!(matches!(of("DELETED", &pod).unwrap(), Event::Gone(_)));
        assert_eq!(of("BOOKMARK", &pod).unwrap(), Event::Bookmark("9".into()));
        assert_eq!(of("RENAMED", &pod).unwrap(), Event::Other);
        let gone = r#"{"kind":"Status","code":410,"reason":"Expired","message":"too old\nresource version"}"#;
        assert_eq!(of("ERROR", gone).unwrap(), Event::Error(410, "too old\\u{a}resource version".into()));
        assert_eq!(of("ERROR", "{}").unwrap(), Event::Error(500, String::new()));
        assert!(of("ADDED", "7").is_err() && event(b"{").is_err() && event(b"\xff\n").is_err());
    }

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let mut lines = Lines::default();
        assert!(lines.feed(b"{\"a\"").unwrap().is_empty());
        assert_eq!(lines.feed(b":1}\n\n \r\n{}").unwrap(), [b"{\"a\":1}\n".to_vec()]);
        assert_eq!(lines.feed(b"\n").unwrap(), [b"{}\n".to_vec()]);
    }

    #[test]
    fn c111_a_line_without_an_end_is_not_kept() {
        let mut lines = Lines::default();
        let chunk = vec![b'x'; MAX_LINE / 4];
        let fed = (0..5).map(|_| lines.feed(&chunk)).find_map(Result::err);
        assert!(matches!(fed, Some(DecodeError::TooLong)));
        assert!(lines.rest.len() <= MAX_LINE);
    }

    #[test]
    fn a_servers_words_are_short_and_printable() {
        let (code, words) = status("\u{1b}[31m\u{202e}".repeat(500).as_bytes());
        assert_eq!(code, None);
        assert!(words.len() <= MAX_WORDS && !words.contains('\u{1b}') && !words.contains('\u{202e}'));
    }
}
