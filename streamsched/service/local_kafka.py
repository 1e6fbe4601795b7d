"""Apache Kafka on this machine: jars through Maven, one node in KRaft mode, set up for a small and quick start.

The jars come from Maven Central through the machine's own `mvn`, which brings its mirrors and proxies along, once per
user and version, into a cache folder. Everything else is in the stack's data folder.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from streamsched.errors import UserError

KAFKA_VERSION = "4.1.1"
MESSAGE_BYTES_MAX = 32 * 1024 * 1024
"""Largest message the broker takes; a topic's `max.message.bytes` may ask for less. Dead letters hold whole inputs."""
_JAVA_MIN = 17
_SCALA = "2.13"
_INSTALL = "apt-get install openjdk-17-jre-headless maven"
_FETCH_DEADLINE_S = 600.0
_FORMAT_DEADLINE_S = 120.0

# Kafka's own jar depends on the slf4j interface only: without an implementation the broker logs nothing at all.
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>streamsched</groupId><artifactId>kafka-jars</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_{scala}</artifactId><version>{kafka}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>2.24.3</version>
    </dependency>
  </dependencies>
</project>
"""

_LOG4J = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %m (%c{1})%n%throwable{short.message}
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
"""

# One replica of everything, one partition per internal topic (50 by default: most of a start's time), no wait for more
# group members. A restart after kill -9 has to wait until the controller forgets the old run of the broker, hence the
# short session; heartbeats every 0.5 s keep it alive on a busy machine. Data is not fsynced per message: what was
# acknowledged survives kill -9 of the broker (the page cache is the kernel's), not a power cut of this one machine.
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
log.dirs={log_dir}
auto.create.topics.enable=false
num.partitions=1
default.replication.factor=1
min.insync.replicas=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
message.max.bytes={message_bytes_max}
replica.fetch.max.bytes={message_bytes_max}
socket.request.max.bytes=104857600
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
num.network.threads=2
num.io.threads=4
num.recovery.threads.per.data.dir=2
background.threads=2
log.cleaner.dedupe.buffer.size=16777216
log.segment.bytes=134217728
log.index.size.max.bytes=1048576
"""


def java_command() -> str:
    """Path of a Java of version 17 or later ($JAVA_HOME first, then PATH)."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else None
    java = java or shutil.which("java")
    if java is None:
        raise UserError(f"stack local needs Java {_JAVA_MIN} or later, and there is no java here: {_INSTALL}")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(?:1\.)?(\d+)', said)
    if version is None:
        raise UserError(f"{java} -version does not tell a version: {_one_line(said)}")
    if int(version[1]) < _JAVA_MIN:
        raise UserError(f"stack local needs Java {_JAVA_MIN} or later, {java} is Java {version[1]}: {_INSTALL}")
    return java


def kafka_jars() -> Path:
    """Folder with Kafka's jars, fetched by `mvn` when it is not in the cache yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamsched"
    jars = cache / f"kafka-{KAFKA_VERSION}"
    if not jars.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"kafka-{KAFKA_VERSION}.", dir=cache) as folder:
                _keep(_fetch_jars(Path(folder)), jars)
        except OSError as error:
            raise UserError(f"cannot keep Kafka's jars in {cache}: {error.strerror or error}") from None
    return jars


def _fetch_jars(work: Path) -> Path:
    mvn = shutil.which("mvn")
    if mvn is None:
        raise UserError(f"stack local fetches Kafka {KAFKA_VERSION} through Maven, and there is no mvn: {_INSTALL}")
    pom, jars = work / "pom.xml", work / "jars"
    pom.write_text(_POM.format(scala=_SCALA, kafka=KAFKA_VERSION), encoding="utf-8")
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={jars}"]
    try:
        done = subprocess.run(
            [mvn, "-q", "-B", "-f", str(pom), *goal],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_FETCH_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"mvn did not fetch Kafka {KAFKA_VERSION} within {_FETCH_DEADLINE_S:g} s") from None
    if done.returncode != 0:
        raise UserError(f"mvn could not fetch Kafka {KAFKA_VERSION}: {_maven_error(done.stdout)}")
    return jars


def _keep(jars: Path, target: Path) -> None:
    """Rename into place, so that nobody sees half a folder; another process may have been first."""
    try:
        jars.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def prepare(java: str, jars: Path, home: Path, port: int, controller_port: int) -> list[str]:
    """Write the broker's configuration, format its storage unless it has data; returns the command that runs it."""
    data = home / "data"
    properties, log4j = home / "server.properties", home / "log4j2.properties"
    home.mkdir(parents=True, exist_ok=True)
    log4j.write_text(_LOG4J, encoding="utf-8")
    properties.write_text(
        _PROPERTIES.format(
            port=port, controller_port=controller_port, log_dir=data, message_bytes_max=MESSAGE_BYTES_MAX
        ),
        encoding="utf-8",
    )
    if not (data / "meta.properties").exists():
        _format_storage(java, jars, properties)
    heap = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"]
    logging = f"-Dlog4j2.configurationFile={log4j.as_uri()}"
    return [java, *heap, logging, "-cp", f"{jars}/*", "kafka.Kafka", str(properties)]


def _format_storage(java: str, jars: Path, properties: Path) -> None:
    # A short run: the quick compiler only, and no parallel collector's threads.
    quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
    tool = ["kafka.tools.StorageTool", "format", "-t", _cluster_id(), "-c", str(properties)]
    try:
        done = subprocess.run(
            [java, *quick, "-cp", f"{jars}/*", *tool],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_FORMAT_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"Kafka's storage tool did not end within {_FORMAT_DEADLINE_S:g} s") from None
    if done.returncode != 0:
        raise UserError(f"Kafka's storage cannot be formatted: {_one_line(done.stdout + done.stderr)}")


def _cluster_id() -> str:
    """A random id in Kafka's form (base64url of 16 bytes); one that starts with a dash reads as an option."""
    return "s" + base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")[1:]


def _maven_error(output: str) -> str:
    """Maven repeats itself over dozens of lines; the first error line says it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    errors = [line.removeprefix("[ERROR]") for line in plain.splitlines() if line.startswith("[ERROR]")]
    return " ".join((errors[0] if errors else plain).split())[:400]


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= 400 else "..." + joined[-397:]
