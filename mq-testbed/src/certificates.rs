//! Certificates for tests, made when they are needed: good ones, and one of each kind that must be refused.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};

use crate::{Folder, Problem, Result, folders, programs};

/// A certificate and its key, as PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key, unencrypted PKCS#8.
    pub key: PathBuf,
    /// Key and certificate in one file, as Kafka wants them.
    pub both: PathBuf,
}

/// A small world of certificates in one folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificates {
    /// The authority that clients and servers trust.
    pub authority: PathBuf,
    /// Another authority, which signed nothing here: to trust it is to refuse the server.
    pub other_authority: PathBuf,
    /// For a server at `localhost` and 127.0.0.1.
    pub server: Pair,
    /// For a server of another name.
    pub misnamed_server: Pair,
    /// For the right server, but expired in 2001.
    pub expired_server: Pair,
    /// For a client called `client`.
    pub client: Pair,
    /// For a client, signed by the other authority.
    pub foreign_client: Pair,
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    file: PathBuf,
}

fn failed(what: &str) -> impl FnOnce(rcgen::Error) -> Problem {
    Problem::during(format!("make {what}"))
}

impl Certificates {
    /// Makes all of them in a folder of this run, which goes with what comes second.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn for_run() -> Result<(Self, Folder)> {
        let folder = Folder::for_run()?;
        let made = Self::make(&folder.path().join("certificates"))?;
        Ok((made, folder))
    }

    /// Makes all of them in the folder.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn make(folder: &Path) -> Result<Self> {
        folders::make(folder)?;
        let good = Authority::make(folder, "ca")?;
        let other = Authority::make(folder, "other-ca")?;
        let here = ["localhost", "127.0.0.1"];
        let server = ExtendedKeyUsagePurpose::ServerAuth;
        let client = ExtendedKeyUsagePurpose::ClientAuth;
        Ok(Self {
            server: good.sign(folder, "server", &here, server.clone(), false)?,
            misnamed_server: good.sign(folder, "misnamed", &["elsewhere.example"], server.clone(), false)?,
            expired_server: good.sign(folder, "expired", &here, server, true)?,
            client: good.sign(folder, "client", &[], client.clone(), false)?,
            foreign_client: other.sign(folder, "foreign", &[], client, false)?,
            authority: good.file,
            other_authority: other.file,
        })
    }
}

impl Authority {
    fn make(folder: &Path, name: &str) -> Result<Self> {
        let key = KeyPair::generate().map_err(failed("a key"))?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(failed("an authority"))?;
        let file = folder.join(format!("{name}.pem"));
        programs::write(&file, &certificate.pem())?;
        Ok(Self { issuer: Issuer::new(params, key), file })
    }

    fn sign(
        &self,
        folder: &Path,
        name: &str,
        hosts: &[&str],
        usage: ExtendedKeyUsagePurpose,
        expired: bool,
    ) -> Result<Pair> {
        let key = KeyPair::generate().map_err(failed("a key"))?;
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).map_err(failed("a certificate"))?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        if expired {
            params.not_before = date_time_ymd(2000, 1, 1);
            params.not_after = date_time_ymd(2001, 1, 1);
        }
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed("a certificate"))?;
        let file = |end: &str| folder.join(format!("{name}{end}"));
        let pair = Pair { certificate: file(".pem"), key: file(".key"), both: file("-both.pem") };
        programs::write(&pair.certificate, &certificate.pem())?;
        programs::write(&pair.key, &key.serialize_pem())?;
        programs::write(&pair.both, &(key.serialize_pem() + &certificate.pem()))?;
        Ok(pair)
    }
}
