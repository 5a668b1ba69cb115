//! Owns what clients that are many, slow, silent or long-winded cost the others.
//! Refuses the clients of a library, which behave.

use std::{
    fs,
    io::{Read, Write},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::served::Served;

#[test]
fn clients_that_are_slow_silent_or_many_do_not_stop_a_scrape() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let served = Served::start(directory.path(), "")?;
    // More connections than are kept; some silent, some that never end a request's head.
    let mut crowd = Vec::new();
    for at in 0..500 {
        let mut stream = served.connect()?;
        if at % 2 == 0 {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Slow: ")?;
        }
        crowd.push(stream);
    }
    let begun = Instant::now();
    assert_eq!(served.status("http", "/metrics", &[])?, 200);
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    let pid = served.child.id();
    let sockets = fs::read_dir(format!("/proc/{pid}/fd"))?
        .flatten()
        .filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:")))
        .count();
    assert!(sockets <= 140, "{sockets} sockets are held");
    // The ones that were sent away know it.
    let mut closed = 0;
    for stream in &mut crowd {
        stream.set_read_timeout(Some(Duration::from_millis(1)))?;
        closed += usize::from(
            !matches!(stream.read(&mut [0; 64]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock),
        );
    }
    assert!(closed >= 500 - 130, "{closed}");
    // A head that trickles in is cut off after 30 seconds.
    drop(crowd);
    let mut slow = served.connect()?;
    slow.write_all(b"GET /metrics HTTP/1.1\r\n")?;
    let begun = Instant::now();
    let mut gone = false;
    while begun.elapsed() < Duration::from_secs(45) && !gone {
        sleep(Duration::from_secs(1));
        gone = slow.write_all(b"X: y\r\n").is_err();
    }
    assert!(gone && begun.elapsed() > Duration::from_secs(20), "{:?}", begun.elapsed());
    println!(
        "scrape beside 500 idle connections: {took:?}; a trickling head was cut off after {:?}",
        begun.elapsed()
    );
    Ok(())
}

#[test]
fn heads_and_bodies_are_bounded() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let served = Served::start(directory.path(), "")?;
    let head = |text: String| -> Result<String> {
        let mut stream = served.connect()?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        // It may be closed before it has been sent whole.
        let _ = stream.write_all(text.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        Ok(String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned())
    };
    let long = "a".repeat(64 << 10);
    let of =
        |more: &str| head(format!("GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{more}\r\n"));
    assert!(of("")?.contains("200"));
    assert!(of(&format!("X: {long}\r\n"))?.contains("431"), "{}", of(&format!("X: {long}\r\n"))?);
    let many = "X: y\r\n".repeat(200);
    assert!(of(&many)?.contains("431"), "{}", of(&many)?);
    assert!(of("Content-Length: 1000000\r\n")?.contains("413"));
    assert!(of("Transfer-Encoding: chunked\r\n")?.contains("413"));
    let path = head(format!("GET /{long} HTTP/1.1\r\nHost: a\r\n\r\n"))?;
    assert!(path.contains("414") || path.contains("431"), "{path:?}");
    assert!(head("POST /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".into())?.contains("405"));
    Ok(())
}
