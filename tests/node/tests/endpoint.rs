//! Owns the claims about the served endpoint: who gets in, by what, and what clients that behave badly cost the others.
//! Refuses a client of the agent's own making alone: curl and openssl ask too.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_node::{SimulatedNode, artefacts};
use cotenant_sim_state::NodeConfig;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};

const PASSWORD: &str = "correct horse";

/// Authorities, a server's certificate and clients', as files of one directory.
struct Papers {
    directory: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Papers {
    fn new(directory: &Path) -> Result<Self> {
        let papers = Self { directory: directory.to_owned(), authority: authority("cotenant")? };
        fs::write(papers.file("ca.crt"), papers.authority.pem())?;
        let stranger = authority("stranger")?;
        fs::write(papers.file("stranger.crt"), stranger.pem())?;
        papers.issue("server", &["localhost"], &papers.authority)?;
        papers.issue("client", &["prometheus"], &papers.authority)?;
        papers.issue("other", &["somebody"], &papers.authority)?;
        papers.issue("forged", &["prometheus"], &stranger)?;
        fs::write(papers.file("password"), format!("{PASSWORD}\n"))?;
        fs::write(papers.file("wrong"), "guess\n")?;
        Ok(papers)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }

    fn issue(&self, name: &str, names: &[&str], by: &CertifiedIssuer<'static, KeyPair>) -> Result<()> {
        let key = KeyPair::generate()?;
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        params.subject_alt_names.push(SanType::IpAddress("127.0.0.1".parse()?));
        fs::write(self.file(&format!("{name}.crt")), params.signed_by(&key, by)?.pem())?;
        fs::write(self.file(&format!("{name}.key")), key.serialize_pem())?;
        Ok(())
    }

    /// A web configuration beside them.
    fn web(&self, text: &str) -> Result<String> {
        fs::write(self.file("web.yml.new"), text)?;
        fs::rename(self.file("web.yml.new"), self.file("web.yml"))?;
        Ok(self.path("web.yml"))
    }
}

fn authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    Ok(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?)
}

const TLS: &str = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n";

fn users() -> Result<String> {
    let output = Command::new("htpasswd")
        .args(["-nbBC", "10", "alice", PASSWORD])
        .output()
        .context("htpasswd is missing: run `make setup`")?;
    let line = String::from_utf8(output.stdout)?;
    let (user, hash) = line.trim().split_once(':').context("USER:HASH")?;
    Ok(format!("basic_auth_users:\n  {user}: {hash}\n"))
}

/// The agent alone: what it serves is not the matter here.
struct Served {
    child: std::process::Child,
    address: String,
    config: PathBuf,
    log: PathBuf,
    _node: SimulatedNode,
}

impl Served {
    fn start(directory: &Path, web: &str) -> Result<Self> {
        let node = SimulatedNode::create(directory, &NodeConfig::h200(1, 0.0))?;
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let config = directory.join("cotenant.toml");
        fs::write(
            &config,
            format!(
                "[server]\nlisten = \"{address}\"\nweb_config = \"{web}\"\n[agent]\ncontrol = \"\"\n[nvml]\nenabled = false\n"
            ),
        )?;
        let log = directory.join("agent.log");
        let child = Command::new(artefacts()?.join("cotenant"))
            .args(["run", "--config"])
            .arg(&config)
            .env(cotenant_sim_state::NODE_VARIABLE, directory)
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        let served = Self { child, address: address.to_string(), config, log, _node: node };
        let begun = Instant::now();
        while !fs::read_to_string(&served.log)?.contains("serving") {
            ensure!(begun.elapsed() < Duration::from_mins(1), "{}", fs::read_to_string(&served.log)?);
            sleep(Duration::from_millis(20));
        }
        // The first tick.
        sleep(Duration::from_millis(1_500));
        Ok(served)
    }

    /// `curl`: status and body, or its exit code and what it said.
    fn curl(&self, scheme: &str, path: &str, more: &[&str]) -> Result<Result<(u16, String), (i32, String)>> {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "20", "--write-out", "\n%{http_code}"])
            .args(more)
            .arg(format!("{scheme}://{}{path}", self.address))
            .output()
            .context("curl is missing: run `make setup`")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Ok(Err((output.status.code().unwrap_or(-1), said)));
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (body, status) = text.rsplit_once('\n').context("a status")?;
        Ok(Ok((status.parse()?, body.to_owned())))
    }

    fn status(&self, scheme: &str, path: &str, more: &[&str]) -> Result<u16> {
        match self.curl(scheme, path, more)? {
            Ok((status, _)) => Ok(status),
            Err((code, said)) => bail!("curl ended with {code}: {said}"),
        }
    }

    fn cotenant(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(artefacts()?.join("cotenant"));
        Ok(command.args(arguments).args(["--address", &self.address]).output()?)
    }

    /// What the doctor says of this agent: state, what it saw, and the remedy.
    fn doctor(&self, access: &[&str]) -> Result<(String, String, String)> {
        let output = Command::new(artefacts()?.join("cotenant"))
            .args(["doctor", "--output", "json", "--config"])
            .arg(&self.config)
            .args(access)
            .output()?;
        let page: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let checks = page["checks"].as_array().context("checks")?;
        let agent = checks.iter().find(|check| check["name"] == "agent").context("agent")?;
        let word = |key: &str| agent[key].as_str().unwrap_or_default().to_owned();
        Ok((word("state"), word("seen"), word("remedy")))
    }

    fn connect(&self) -> Result<TcpStream> {
        Ok(TcpStream::connect(&self.address)?)
    }

    fn feature(&self, scheme: &str, more: &[&str]) -> Result<(String, String)> {
        let answer = self.curl(scheme, "/status", more)?;
        let Ok((200, text)) = answer else { bail!("{answer:?}") };
        let status: serde_json::Value = serde_json::from_str(&text)?;
        let features = status["features"].as_array().context("features")?;
        let endpoint = features.iter().find(|one| one["name"] == "endpoint").context("endpoint")?;
        let word = |key: &str| endpoint[key].as_str().unwrap_or_default().to_owned();
        Ok((word("state"), word("reason")))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(i32::try_from(self.child.id()).unwrap_or(0), libc::SIGTERM) };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20) {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn tls_is_spoken_with_whoever_trusts_the_authority_and_plain_http_is_told_so() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let papers = Papers::new(directory.path())?;
    let headers = "http_server_config:\n  headers:\n    X-Frame-Options: deny\n";
    let served = Served::start(directory.path(), &papers.web(&format!("{TLS}{headers}"))?)?;
    let (trusted, strange) = (papers.path("ca.crt"), papers.path("stranger.crt"));
    let Ok((200, page)) = served.curl("https", "/metrics", &["--cacert", &trusted, "--include"])? else {
        bail!("no page");
    };
    let page = page.to_ascii_lowercase();
    for part in ["cotenant_agent", "x-frame-options: deny", "content-length: "] {
        assert!(page.contains(part), "{part}");
    }
    // 60: the certificate cannot be verified.
    let refused = served.curl("https", "/metrics", &["--cacert", &strange])?;
    assert!(matches!(&refused, Err((60, _))), "{refused:?}");
    let plain = served.curl("http", "/metrics", &[])?;
    assert!(
        matches!(&plain, Ok((400, body)) if body.contains("HTTP request to an HTTPS server")),
        "{plain:?}"
    );
    // 35: nothing older than TLS 1.2.
    let old = served.curl("https", "/metrics", &["--cacert", &trusted, "--tls-max", "1.1"])?;
    assert!(matches!(&old, Err((35, _))), "{old:?}");
    assert_eq!(served.status("https", "/metrics", &["--cacert", &trusted, "--tls-max", "1.2"])?, 200);
    let openssl = Command::new("openssl")
        .args([
            "s_client",
            "-connect",
            &served.address,
            "-CAfile",
            &trusted,
            "-verify_return_error",
            "-brief",
        ])
        .stdin(std::process::Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&openssl.stderr).into_owned();
    assert!(said.contains("TLSv1.3") && said.contains("Verification: OK"), "{said}");

    let asked = served.cotenant(&["explain", "--ca", &trusted])?;
    let said = String::from_utf8_lossy(&asked.stdout).into_owned();
    assert!(asked.status.success() && said.contains("no incidents"), "{asked:?}");
    for (arguments, word) in [(&["explain"][..], "--ca"), (&["explain", "--ca", &strange], "TLS failed")] {
        let asked = served.cotenant(arguments)?;
        let said = String::from_utf8_lossy(&asked.stderr).into_owned();
        assert!(!asked.status.success() && said.contains(word), "{said}");
    }
    let (_, seen, _) = served.doctor(&["--ca", &trusted])?;
    assert!(seen.contains(&format!(" on {}, ready", served.address)), "{seen}");
    for access in [&[][..], &["--ca", &strange]] {
        let (state, seen, remedy) = served.doctor(access)?;
        assert!(state == "degraded" && remedy.contains("--ca"), "{state}: {seen}; {remedy}");
    }
    let recording = papers.path("recording");
    let recorded = Command::new(artefacts()?.join("cotenant"))
        .args(["record", &recording, "--for", "3s", "--from", &served.address, "--ca", &trusted])
        .output()?;
    assert!(recorded.status.success() && fs::metadata(&recording)?.len() > 0, "{recorded:?}");
    Ok(())
}

#[test]
fn a_client_needs_a_certificate_of_the_right_authority_with_the_right_name() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let papers = Papers::new(directory.path())?;
    let clients = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n  client_allowed_sans: \
                   [prometheus]\n";
    let served = Served::start(directory.path(), &papers.web(&format!("{TLS}{clients}"))?)?;
    let trusted = papers.path("ca.crt");
    let as_client = |name: &str| {
        let (certificate, key) = (papers.path(&format!("{name}.crt")), papers.path(&format!("{name}.key")));
        served.curl("https", "/metrics", &["--cacert", &trusted, "--cert", &certificate, "--key", &key])
    };
    let right = as_client("client")?;
    assert!(matches!(right, Ok((200, _))), "{right:?}");
    for name in ["other", "forged"] {
        let refused = as_client(name)?;
        assert!(refused.is_err(), "{name}: {refused:?}");
    }
    assert!(served.curl("https", "/metrics", &["--cacert", &trusted])?.is_err());
    let (certificate, key) = (papers.path("client.crt"), papers.path("client.key"));
    let asked = served.cotenant(&["explain", "--ca", &trusted, "--cert", &certificate, "--key", &key])?;
    assert!(asked.status.success(), "{asked:?}");
    let asked = served.cotenant(&["explain", "--ca", &trusted])?;
    assert!(
        !asked.status.success() && String::from_utf8_lossy(&asked.stderr).contains("--cert"),
        "{asked:?}"
    );
    let (_, seen, _) = served.doctor(&["--ca", &trusted, "--cert", &certificate, "--key", &key])?;
    assert!(seen.contains(&format!(" on {}, ready", served.address)), "{seen}");
    let (state, seen, remedy) = served.doctor(&["--ca", &trusted])?;
    assert!(state == "degraded" && remedy.contains("--cert"), "{state}: {seen}; {remedy}");
    Ok(())
}

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

#[test]
fn certificates_and_users_are_read_again_and_a_broken_file_changes_nothing() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let papers = Papers::new(directory.path())?;
    let served = Served::start(directory.path(), &papers.web(TLS)?)?;
    let trusted = papers.path("ca.crt");
    let until = |wanted: &dyn Fn() -> Result<bool>| -> Result<()> {
        let begun = Instant::now();
        while !wanted()? {
            ensure!(begun.elapsed() < Duration::from_secs(20), "it was not read again");
            sleep(Duration::from_millis(100));
        }
        Ok(())
    };
    assert_eq!(served.status("https", "/metrics", &["--cacert", &trusted])?, 200);
    // A certificate of another authority takes its place.
    let renewed = authority("renewed")?;
    fs::write(papers.file("renewed.crt"), renewed.pem())?;
    papers.issue("server", &["localhost"], &renewed)?;
    let renewed = papers.path("renewed.crt");
    until(&|| Ok(matches!(served.curl("https", "/metrics", &["--cacert", &renewed])?, Ok((200, _)))))?;
    assert!(served.curl("https", "/metrics", &["--cacert", &trusted])?.is_err());
    // Users come, without a restart.
    papers.web(&format!("{TLS}{}", users()?))?;
    let right = format!("alice:{PASSWORD}");
    until(&|| Ok(served.status("https", "/metrics", &["--cacert", &renewed])? == 401))?;
    let known = ["--cacert", &renewed, "--user", &right];
    assert_eq!(served.status("https", "/metrics", &known)?, 200);
    // A mistake leaves the last valid rules in force, and is told.
    papers.web("tls_server_confg: {}\n")?;
    until(&|| Ok(served.feature("https", &known)?.0 == "degraded"))?;
    assert!(
        served.feature("https", &known)?.1.contains("tls_server_confg"),
        "{:?}",
        served.feature("https", &known)?
    );
    assert_eq!(served.status("https", "/metrics", &["--cacert", &renewed])?, 401);
    papers.web(TLS)?;
    until(&|| {
        Ok(served.curl("https", "/status", &["--cacert", &renewed])?.is_ok_and(|(status, _)| status == 200))
    })?;
    until(&|| Ok(served.feature("https", &["--cacert", &renewed])?.0 == "active"))
}

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

#[test]
fn a_public_address_without_tls_or_password_is_warned_of_at_start() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("c.toml");
    for (address, web, warned) in [("0.0.0.0:0", "", true), ("127.0.0.1:0", "", false)] {
        fs::write(
            &config,
            format!(
                "[server]\nlisten = \"{address}\"\nweb_config = \"{web}\"\n[agent]\ncontrol = \"\"\n[nvml]\nenabled = false\n"
            ),
        )?;
        let log = directory.path().join("log");
        let mut child = Command::new("timeout")
            .args(["--signal=TERM", "3"])
            .arg(artefacts()?.join("cotenant"))
            .args(["run", "--config"])
            .arg(&config)
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        child.wait()?;
        let text = fs::read_to_string(&log)?;
        assert_eq!(text.contains("served to anybody"), warned, "{address}: {text}");
    }
    Ok(())
}

#[test]
fn a_web_configuration_that_is_not_valid_is_refused_with_its_line() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let papers = Papers::new(directory.path())?;
    let web = papers.web("tls_server_config:\n  cert_file: server.crt\n  key_fil: server.key\n")?;
    let config = directory.path().join("c.toml");
    fs::write(&config, format!("[server]\nweb_config = \"{web}\"\n"))?;
    let config = config.display().to_string();
    for arguments in [&["config", "check", &config][..], &["run", "--config", &config]] {
        let output = Command::new(artefacts()?.join("cotenant")).args(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("line 3") && said.contains("key_fil"), "{said}");
    }
    papers.web("tls_server_config:\n  cert_file: server.crt\n  key_file: client.key\n")?;
    let output = Command::new(artefacts()?.join("cotenant")).args(["config", "check", &config]).output()?;
    assert!(String::from_utf8_lossy(&output.stderr).contains("do not belong together"), "{output:?}");
    Ok(())
}

/// Stops one thread for as long as it lives, as a lock that nobody gives back would.
const STOPPER: &str = r"
import ctypes, os, sys
libc, thread = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
for request in (0x4206, 0x4207):
    if libc.ptrace(request, thread, None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(thread, 0x40000000)
print('stopped', flush=True)
sys.stdin.read()
";

#[test]
fn a_tick_that_hangs_is_seen_by_the_liveness_probe_and_the_pages_stay() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let served = Served::start(directory.path(), "")?;
    assert_eq!(served.status("http", "/healthz", &[])?, 200);
    let tick = fs::read_dir(format!("/proc/{}/task", served.child.id()))?
        .filter_map(|task| Some(task.ok()?.path()))
        .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "tick"))
        .context("a thread called tick")?;
    let thread = tick.file_name().and_then(|name| name.to_str()).context("its number")?.to_owned();
    let mut stopper = Command::new("python3")
        .args(["-c", STOPPER, &thread])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    let mut said = [0; 7];
    stopper.stdout.take().context("stdout")?.read_exact(&mut said)?;
    let begun = Instant::now();
    let mut answer = served.curl("http", "/healthz", &[])?;
    while matches!(&answer, Ok((200, _))) && begun.elapsed() < Duration::from_mins(1) {
        sleep(Duration::from_millis(500));
        answer = served.curl("http", "/healthz", &[])?;
    }
    let seen = begun.elapsed();
    assert!(
        matches!(&answer, Ok((503, text)) if text.contains("no tick has come to its end")),
        "{answer:?} after {seen:?}"
    );
    // Ten intervals, and 30 s at least; not at the first slow tick.
    assert!((Duration::from_secs(28)..Duration::from_secs(45)).contains(&seen), "{seen:?}");
    assert_eq!(served.status("http", "/readyz", &[])?, 503);
    assert_eq!(served.status("http", "/metrics", &[])?, 200, "what was read last is still there to be read");
    // The thread goes on, and so it is alive again.
    drop(stopper.stdin.take());
    stopper.wait()?;
    sleep(Duration::from_secs(3));
    assert_eq!(served.status("http", "/healthz", &[])?, 200);
    Ok(())
}
