//! Owns who is let in by TLS: servers that clients can believe, and clients with certificates.
//! Refuses to take curl's word for the protocol: openssl is asked as well.

use std::{fs, process::Command};

use anyhow::{Result, bail};
use cotenant_node::artefacts;

use crate::{
    papers::{Papers, TLS},
    served::Served,
};

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
