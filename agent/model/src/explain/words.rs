//! Owns how times, sizes, shares and names are written for people.
//! Refuses raw tenant text: names are cut and stripped of control characters before they reach a terminal.

use crate::Tenant;

const GIB: f64 = (1_u64 << 30) as f64;
const MIB: f64 = (1_u64 << 20) as f64;

/// A name this long tells no more.
const NAME: usize = 128;

/// Text that a tenant may have chosen, fit for a terminal: one line, bounded, no control or bidirectional characters.
pub fn clean(text: &str) -> String {
    let plain = |c: char| {
        let hidden = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        if c.is_control() || hidden { '?' } else { c }
    };
    let mut short: String = text.chars().take(NAME).map(plain).collect();
    if text.chars().nth(NAME).is_some() {
        short.push_str("...");
    }
    short
}

/// A tenant as it is called: its label, with the container where there is one.
pub fn who(tenant: &Tenant) -> String {
    match &tenant.container {
        Some(container) => format!("{} ({})", clean(&tenant.name), clean(container)),
        None => clean(&tenant.name),
    }
}

/// UTC, `hh:mm:ss`.
pub fn clock(unix: f64) -> String {
    if !unix.is_finite() {
        return "unknown".to_owned();
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a remainder of a day's seconds"
    )]
    let seconds = unix.rem_euclid(86_400.0) as u32;
    format!("{:02}:{:02}:{:02}", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

/// `76 ms`, `1.25 s`, `3 min 12 s`, `2 h 5 min`. Rounded down where it matters: a unit never overflows into the next.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return "unknown".to_owned();
    }
    let seconds = seconds.max(0.0);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "finite and not negative")]
    let whole = seconds as u64;
    match seconds {
        s if s <= 0.0 => "0 s".to_owned(),
        s if s < 0.000_05 => "less than 0.1 ms".to_owned(),
        s if s < 0.009_95 => format!("{:.1} ms", s * 1e3),
        s if s < 0.9995 => format!("{:.0} ms", s * 1e3),
        s if s < 9.995 => format!("{s:.2} s"),
        s if s < 59.95 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{} min {} s", whole.max(60) / 60, whole.max(60) % 60),
        _ => format!("{} h {} min", whole / 3600, whole / 60 % 60),
    }
}

/// `23.6 GiB`; below a tenth of that MiB, below that bytes.
pub fn gib(bytes: u64) -> String {
    let bytes_f = bytes as f64;
    match bytes_f {
        b if b >= 0.1 * GIB => format!("{:.1} GiB", b / GIB),
        b if b >= MIB => format!("{:.0} MiB", b / MIB),
        _ => format!("{bytes} bytes"),
    }
}

/// `23.6 GiB (25,340,444,672 bytes)`.
pub fn gib_exact(bytes: u64) -> String {
    let short = gib(bytes);
    if short.ends_with("bytes") {
        return short;
    }
    let digits = bytes.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{short} ({grouped} bytes)")
}

/// `62 %`, `4.5 %`, `99.6 %`. Only all of it is `100 %`.
pub fn percent(share: f64) -> String {
    let hundred = share * 100.0;
    match hundred {
        h if !h.is_finite() => "an unknown share".to_owned(),
        h if h <= 0.0 => "0 %".to_owned(),
        h if h < 0.05 => "less than 0.1 %".to_owned(),
        h if h < 9.95 => format!("{h:.1} %"),
        h if h < 99.0 => format!("{h:.0} %"),
        h if h < 99.95 => format!("{h:.1} %"),
        h if h < 100.0 - 1e-6 => "more than 99.9 %".to_owned(),
        h => format!("{h:.0} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TenantKind;

    #[test]
    fn times() {
        assert_eq!(clock(1_796_030_494.9), "09:21:34");
        assert_eq!(clock(86_399.999), "23:59:59");
        assert_eq!(clock(f64::NAN), "unknown");
        let cases = [
            (0.0, "0 s"),
            (0.000_01, "less than 0.1 ms"),
            (0.000_35, "0.3 ms"),
            (0.0763, "76 ms"),
            (1.25, "1.25 s"),
            (12.34, "12.3 s"),
            (59.96, "1 min 0 s"),
            (192.0, "3 min 12 s"),
            (7500.0, "2 h 5 min"),
            (f64::INFINITY, "unknown"),
        ];
        for (seconds, words) in cases {
            assert_eq!(duration(seconds), words, "{seconds}");
        }
    }

    #[test]
    fn sizes_and_shares() {
        assert_eq!(gib(25_340_444_672), "23.6 GiB");
        assert_eq!(gib_exact(25_340_444_672), "23.6 GiB (25,340,444,672 bytes)");
        assert_eq!(gib_exact(2 << 20), "2 MiB (2,097,152 bytes)");
        assert_eq!(gib_exact(512), "512 bytes");
        let cases = [
            (0.0, "0 %"),
            (0.0001, "less than 0.1 %"),
            (0.045, "4.5 %"),
            (0.62, "62 %"),
            (0.992, "99.2 %"),
            (0.9999, "more than 99.9 %"),
            (1.0, "100 %"),
        ];
        for (share, words) in cases {
            assert_eq!(percent(share), words, "{share}");
        }
    }

    #[test]
    fn names_of_tenants_cannot_drive_a_terminal() {
        let hostile = Tenant::plain(TenantKind::Docker, "a\u{1b}[2J\n\u{202e}b");
        assert_eq!(who(&hostile), "docker:a?[2J??b");
        let long = Tenant::plain(TenantKind::Docker, &"x".repeat(5000));
        assert_eq!(who(&long).len(), NAME + 3);
    }
}
