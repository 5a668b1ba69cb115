//! Owns who is let in by password, and what those who guess cost the others.
//! Refuses a hash of the agent's own making: htpasswd makes it.

use std::{
    io::{Read, Write},
    net::TcpStream,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use crate::{
    papers::{PASSWORD, Papers, users},
    served::Served,
};

#[test]
fn a_wrong_password_is_401_and_guesses_do_not_stop_a_scrape() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let papers = Papers::new(directory.path())?;
    let served = Served::start(directory.path(), &papers.web(&users()?)?)?;
    let right = format!("alice:{PASSWORD}");
    assert_eq!(served.status("http", "/metrics", &["--user", &right])?, 200);
    for wrong in ["alice:guess", "bob:guess", "alice:", &format!("bob:{PASSWORD}")] {
        assert_eq!(served.status("http", "/metrics", &["--user", wrong])?, 401, "{wrong}");
    }
    for path in ["/metrics", "/status", "/api/v1/incidents", "/api/v1/recording", "/nowhere"] {
        assert_eq!(served.status("http", path, &[])?, 401, "{path}");
    }
    // A probe has no password; it is told nothing but whether.
    assert_eq!(served.status("http", "/healthz", &[])?, 200);
    let ready = served.curl("http", "/readyz", &[])?;
    assert!(matches!(&ready, Ok((200, text)) if text == "ready\n"), "{ready:?}");
    let ready = served.curl("http", "/readyz", &["--user", &right])?;
    assert!(matches!(&ready, Ok((200, text)) if text.starts_with("ready\n")), "{ready:?}");
    guesses(&served, &right, &papers)
}

fn guesses(served: &Served, right: &str, papers: &Papers) -> Result<()> {
    let (user, wrong) = (papers.path("password"), papers.path("wrong"));
    let asked = served.cotenant(&["explain", "--user", "alice", "--password-file", &user])?;
    assert!(asked.status.success(), "{asked:?}");
    for arguments in [&["explain"][..], &["explain", "--user", "alice", "--password-file", &wrong]] {
        let asked = served.cotenant(arguments)?;
        assert!(String::from_utf8_lossy(&asked.stderr).contains("--user"), "{asked:?}");
    }
    let (_, seen, _) = served.doctor(&["--user", "alice", "--password-file", &user])?;
    assert!(seen.contains(&format!(" on {}, ready", served.address)), "{seen}");
    let (state, seen, remedy) = served.doctor(&[])?;
    assert!(state == "degraded" && remedy.contains("--user"), "{state}: {seen}; {remedy}");
    // 100 clients that guess, each a new password each time, for three seconds.
    let end = Instant::now() + Duration::from_secs(3);
    let guessers: Vec<_> = (0..100)
        .map(|who| {
            let address = served.address.clone();
            thread::spawn(move || {
                let mut guess = 0;
                while Instant::now() < end {
                    guess += 1;
                    let _ = guessed(&address, &format!("{who}-{guess}"));
                }
            })
        })
        .collect();
    sleep(Duration::from_millis(500));
    let mut slowest = Duration::ZERO;
    while Instant::now() < end {
        let begun = Instant::now();
        assert_eq!(served.status("http", "/metrics", &["--user", right])?, 200);
        slowest = slowest.max(begun.elapsed());
    }
    for guesser in guessers {
        guesser.join().expect("no panic");
    }
    // What a scraper waits by default.
    assert!(slowest < Duration::from_secs(10), "a scrape took {slowest:?}");
    println!("slowest scrape while 100 clients guess: {slowest:?}");
    Ok(())
}

fn guessed(address: &str, password: &str) -> Result<()> {
    let encoded = base64(&format!("alice:{password}"));
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Basic {encoded}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let head = String::from_utf8_lossy(&answer);
    ensure!(head.starts_with("HTTP/1.1 401") || head.starts_with("HTTP/1.1 503"), "{head}");
    Ok(())
}

fn base64(text: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    text.as_bytes()
        .chunks(3)
        .flat_map(|chunk| {
            let word =
                chunk.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
            (0..4).map(move |at| {
                if at > chunk.len() {
                    '='
                } else {
                    char::from(ALPHABET[(word >> (18 - 6 * at)) as usize & 63])
                }
            })
        })
        .collect()
}
