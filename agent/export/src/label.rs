//! Owns what a label value may look like: bounded, printable, and still one value for one thing.
//! Refuses to lose a difference: a value that had to change carries a hash of the original.

use std::borrow::Cow;
use std::fmt::Write as _;

use cotenant_model::Tenant;

/// Characters in a label value at most.
pub(crate) const MAX_CHARS: usize = 128;
/// `~` and eight hexadecimal digits.
const MARK_CHARS: usize = 9;

/// The value as it is published. Clean values, which are nearly all, are borrowed.
///
/// Names of tenants come from the tenants. Control characters, line separators and invisible or direction-changing
/// characters become U+FFFD, and what is too long is cut; both would let two names become one, so such a value
/// ends in `~` and 32 bits of FNV-1a over the original.
pub(crate) fn clean(value: &str) -> Cow<'_, str> {
    let short = value.len() <= MAX_CHARS || value.chars().count() <= MAX_CHARS;
    if short && !value.chars().any(is_hostile) {
        return Cow::Borrowed(value);
    }
    let kept = value.chars().take(MAX_CHARS - MARK_CHARS);
    let mut text: String =
        kept.map(|c| if is_hostile(c) { char::REPLACEMENT_CHARACTER } else { c }).collect();
    let _ = write!(text, "~{:08x}", fnv1a(value.as_bytes()));
    Cow::Owned(text)
}

/// The tenant with every name as published; `None` when it already is.
pub(crate) fn clean_tenant(tenant: &Tenant) -> Option<Tenant> {
    let names =
        [Some(&tenant.name), tenant.namespace.as_ref(), tenant.pod.as_ref(), tenant.container.as_ref()];
    if names.into_iter().flatten().all(|name| matches!(clean(name), Cow::Borrowed(_))) {
        return None;
    }
    let optional = |name: &Option<String>| name.as_deref().map(|name| clean(name).into_owned());
    Some(Tenant {
        name: clean(&tenant.name).into_owned(),
        kind: tenant.kind,
        namespace: optional(&tenant.namespace),
        pod: optional(&tenant.pod),
        container: optional(&tenant.container),
    })
}

fn is_hostile(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// FNV-1a, 32 bits. Not the standard library's hasher: the name of a series must survive an upgrade.
fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_values_are_borrowed_and_others_marked() {
        assert!(matches!(clean("pod:ml/train-0"), Cow::Borrowed(_)));
        assert!(matches!(clean("systemd:run-u1\\x2d2.service"), Cow::Borrowed(_)));
        assert!(matches!(clean(&"é".repeat(MAX_CHARS)), Cow::Borrowed(_)));
        assert_eq!(clean("a\nb"), format!("a\u{fffd}b~{:08x}", fnv1a(b"a\nb")));
    }

    #[test]
    fn long_names_with_one_beginning_stay_apart() {
        let (one, two) = ("x".repeat(200) + "1", "x".repeat(200) + "2");
        assert_ne!(clean(&one), clean(&two));
        assert_eq!(clean(&one).chars().count(), MAX_CHARS);
        assert_ne!(clean("a\u{1}"), clean("a\u{2}"));
    }

    #[test]
    fn fnv1a_is_the_published_function() {
        assert_eq!(fnv1a(b""), 0x811c_9dc5);
        assert_eq!(fnv1a(b"foobar"), 0xbf9c_f968);
    }
}
