//! Owns what a server and its clients show each other: authorities, certificates, keys, passwords, the web configuration.
//! Refuses to serve anything with them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};

pub(crate) const PASSWORD: &str = "correct horse";

/// Authorities, a server's certificate and clients', as files of one directory.
pub(crate) struct Papers {
    directory: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Papers {
    pub(crate) fn new(directory: &Path) -> Result<Self> {
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

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.file(name).display().to_string()
    }

    pub(crate) fn issue(
        &self,
        name: &str,
        names: &[&str],
        by: &CertifiedIssuer<'static, KeyPair>,
    ) -> Result<()> {
        let key = KeyPair::generate()?;
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        params.subject_alt_names.push(SanType::IpAddress("127.0.0.1".parse()?));
        fs::write(self.file(&format!("{name}.crt")), params.signed_by(&key, by)?.pem())?;
        fs::write(self.file(&format!("{name}.key")), key.serialize_pem())?;
        Ok(())
    }

    /// A web configuration beside them.
    pub(crate) fn web(&self, text: &str) -> Result<String> {
        fs::write(self.file("web.yml.new"), text)?;
        fs::rename(self.file("web.yml.new"), self.file("web.yml"))?;
        Ok(self.path("web.yml"))
    }
}

pub(crate) fn authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    Ok(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?)
}

pub(crate) const TLS: &str = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n";

pub(crate) fn users() -> Result<String> {
    let output = Command::new("htpasswd")
        .args(["-nbBC", "10", "alice", PASSWORD])
        .output()
        .context("htpasswd is missing: run `make setup`")?;
    let line = String::from_utf8(output.stdout)?;
    let (user, hash) = line.trim().split_once(':').context("USER:HASH")?;
    Ok(format!("basic_auth_users:\n  {user}: {hash}\n"))
}
