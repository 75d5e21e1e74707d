//! The command line.

/// How to break the run on purpose: it must then say so and end with 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sabotage {
    /// Billing acknowledges before it works: what fails or dies is lost.
    AckEarly,
    /// Billing acknowledges some orders without working.
    Drop,
    /// Billing bills repeated orders again.
    Double,
}

#[derive(Default, Debug)]
pub struct Options {
    pub url: String,
    /// Members are processes of their own, this many for each group.
    pub processes: Option<usize>,
    /// How many members are killed midway.
    pub kill: usize,
    /// Run midway by `sh -c`, to restart the broker.
    pub restart: Option<String>,
    pub sabotage: Option<Sabotage>,
    /// This process is one member: its group and name.
    pub member: Option<(String, String)>,
    /// The topic, given to members.
    pub topic: Option<String>,
}

const USAGE: &str = "quickstart [--sabotage ack-early|drop|double] [--processes N] [--kill9 K] [--restart CMD]
The broker is MQ_URL, memory:// by default.";

impl Options {
    pub fn read() -> Result<Self, String> {
        let url = std::env::var("MQ_URL").unwrap_or_else(|_| "memory://".to_owned());
        let mut options = Self { url, kill: 1, ..Self::default() };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{flag} needs a value\n{USAGE}"));
            match flag.as_str() {
                "--processes" => options.processes = Some(number(&value()?)?),
                "--kill9" => options.kill = number(&value()?)?,
                "--restart" => options.restart = Some(value()?),
                "--topic" => options.topic = Some(value()?),
                "--member" => options.member = Some((value()?, value()?)),
                "--sabotage" => {
                    options.sabotage = Some(match value()?.as_str() {
                        "ack-early" => Sabotage::AckEarly,
                        "drop" => Sabotage::Drop,
                        "double" => Sabotage::Double,
                        other => return Err(format!("--sabotage {other} is unknown\n{USAGE}")),
                    });
                }
                "--help" => {
                    println!("{USAGE}");
                    std::process::exit(0);
                }
                _ => return Err(format!("{flag} is unknown\n{USAGE}")),
            }
        }
        if options.in_memory() && options.processes.is_some() {
            return Err("memory:// lives in one process; --processes needs MQ_URL to name a server".to_owned());
        }
        // A member that is killed must be a process; with a server each member is one.
        if !options.in_memory() && options.processes.is_none() {
            options.processes = Some(4);
        }
        Ok(options)
    }

    pub fn in_memory(&self) -> bool {
        self.url.starts_with("memory:")
    }

    /// The flags that a member process is started with.
    pub fn for_member(&self, group: &str, name: &str, topic: &str) -> Vec<String> {
        let mut flags = vec!["--member", group, name, "--topic", topic];
        match self.sabotage {
            Some(Sabotage::AckEarly) => flags.extend(["--sabotage", "ack-early"]),
            Some(Sabotage::Drop) => flags.extend(["--sabotage", "drop"]),
            Some(Sabotage::Double) => flags.extend(["--sabotage", "double"]),
            None => {}
        }
        flags.into_iter().map(str::to_owned).collect()
    }
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("'{text}' is not a number"))
}
