//! Owns the web configuration while the agent runs and before it starts: read again, refused, or missing where it matters.
//! Refuses a mistake that costs the rules that were in force.

use std::{
    fs,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use cotenant_node::artefacts;

use crate::{
    papers::{PASSWORD, Papers, TLS, authority, users},
    served::Served,
};

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
        assert!(!text.contains('\u{1b}'), "codes of colours in a log that is no terminal: {text}");
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
