// truth_server: an OpenAI-compatible server whose every chunk leaves on an exact schedule and is logged when it does.
//
// Ground truth for measuring clients: one thread, epoll, a heap of deadlines in nanoseconds, one send() per chunk with
// TCP_NODELAY, CLOCK_MONOTONIC read just before each send(). Its own lateness is no error of a client: truth is what was
// sent, not what was planned, and a request arrives when the kernel received it, not when this thread came to read it.
// Loopback only; every size below has a bound.
//
//   truth_server PORT [MODEL]      PORT 0 takes any free one; the first line on stdout is "listening http://127.0.0.1:PORT"
//
// A request's model name is its schedule (MODEL, "t200-i20" by default, where it names none):
//   t200-i20-n128    first token after 200 ms, a chunk every 20 ms, 128 chunks (no -n: the request's max_tokens)
//   …-k3             three tokens in one event
//   …-b              all streams fire on one common tick of the gap, as one step of a continuous-batching engine does
//
// POST /v1/chat/completions or /v1/completions, "stream": true or false. "rid": N in the body names the request in the log.
// GET /v1/models, /health     what clients ask first
// GET /log                    {"requests": [[rid, arrived_ns, done_ns, tokens, [sent_ns, …]], …]}, finished requests only
// GET /stats                  counts, first and last moment of load, CPU of this process
// GET /reset                  forget; the next request prints the line "request" on stdout

#include <algorithm>
#include <arpa/inet.h>
#include <cctype>
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <linux/net_tstamp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <queue>
#include <string>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

using std::string;

constexpr int MAX_FD = 65536;             // connections, by descriptor
constexpr size_t MAX_REQUEST = 64 << 20;  // bytes of one request: the longest prompts that we send are 20 MB
constexpr size_t MAX_CHUNKS = 100000;     // chunks of one answer
constexpr size_t MAX_LOGGED = 2000000;    // finished requests remembered between two resets
constexpr size_t MAX_TIMES = 20000000;    // chunk times remembered: 160 MB; later requests are logged without theirs
constexpr int DUE_AT_ONCE = 256;          // chunks sent before the sockets are looked at again

static int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static double cpu_s() {
  rusage u;
  getrusage(RUSAGE_SELF, &u);
  return u.ru_utime.tv_sec + u.ru_stime.tv_sec + 1e-6 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

struct Answer {  // one request being answered
  int64_t rid = -1, arrived = 0;
  int64_t ttft = 200000000, gap = 20000000;
  size_t chunks = 128, sent = 0;
  int tokens_each = 1, prompt_tokens = 0;
  bool chat = true, usage = false, aligned = false;
  string head;  // of every event
  std::vector<int64_t> times;
};

struct Logged {  // one request that is over
  int64_t rid, arrived, done;
  size_t tokens;
  std::vector<int64_t> times;
};

struct Connection {
  bool open = false, wants_write = false;
  uint32_t life = 0;    // deadlines of an earlier life are void
  int64_t arrived = 0;  // when the kernel received what was read last
  string in, out;
  Answer *answer = nullptr;
};

struct Deadline {
  int64_t at;
  int fd;
  uint32_t life;
  bool operator<(const Deadline &other) const { return at > other.at; }  // the heap gives the earliest
};

static std::vector<Connection> connections(MAX_FD);
static std::priority_queue<Deadline> deadlines;
static std::vector<Logged> logged;
static int64_t chunks = 0, requests = 0, aborted = 0, active = 0, peak = 0, first_ns = 0, last_ns = 0;
static size_t times_kept = 0;
static double cpu_before = 0;
static string default_model = "t200-i20";
static int poller;

// Connections ---------------------------------------------------------------------------------------------------------

static void over(Connection &c, bool whole) {
  Answer *a = c.answer;
  if (!a) return;
  c.answer = nullptr;
  c.life++;
  active--;
  aborted += !whole;
  last_ns = now_ns();
  if (logged.size() < MAX_LOGGED) {
    if (times_kept + a->times.size() > MAX_TIMES) a->times.clear();
    times_kept += a->times.size();
    logged.push_back({a->rid, a->arrived, last_ns, a->sent * a->tokens_each, std::move(a->times)});
  }
  delete a;
}

static void close_connection(int fd) {
  Connection &c = connections[fd];
  if (!c.open) return;
  over(c, false);
  close(fd);  // leaves the poller with it
  c.open = c.wants_write = false;
  c.life++;
  c.in.clear();
  c.out.clear();
}

static void want_write(int fd, bool want) {
  Connection &c = connections[fd];
  if (c.wants_write == want) return;
  c.wants_write = want;
  epoll_event e{};
  e.events = EPOLLIN | (want ? EPOLLOUT : 0u);
  e.data.fd = fd;
  epoll_ctl(poller, EPOLL_CTL_MOD, fd, &e);
}

// Sends now what the socket takes and keeps the rest. False when the connection is gone.
static bool put(int fd, const string &bytes) {
  Connection &c = connections[fd];
  size_t taken = 0;
  if (c.out.empty()) {
    ssize_t k = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (k < 0 && errno != EAGAIN) {
      close_connection(fd);
      return false;
    }
    taken = k < 0 ? 0 : k;
    if (taken == bytes.size()) return true;
  }
  c.out.append(bytes, taken, string::npos);
  want_write(fd, true);
  return true;
}

static void flush(int fd) {
  Connection &c = connections[fd];
  ssize_t k = send(fd, c.out.data(), c.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (k < 0 && errno != EAGAIN) return close_connection(fd);
  if (k > 0) c.out.erase(0, k);
  if (c.out.empty()) want_write(fd, false);
}

static void reply(int fd, const string &body, const char *status = "200 OK") {
  put(fd, string("HTTP/1.1 ") + status + "\r\nContent-Type: application/json\r\nContent-Length: " +
              std::to_string(body.size()) + "\r\n\r\n" + body);
}

// What a request says -------------------------------------------------------------------------------------------------

static size_t value_of(const string &body, const char *key) {  // where the value of a JSON key begins, or npos
  size_t p = body.find(string("\"") + key + "\"");
  if (p == string::npos) return p;
  p = body.find(':', p);
  return p == string::npos ? p : body.find_first_not_of(" \t\r\n", p + 1);
}

static int64_t integer(const string &body, const char *key, int64_t otherwise) {
  size_t p = value_of(body, key);
  return p == string::npos || !isdigit((unsigned char)body[p]) ? otherwise : atoll(body.c_str() + p);
}

static bool truth(const string &body, const char *key) {
  size_t p = value_of(body, key);
  return p != string::npos && body[p] == 't';
}

static string word(const string &body, const char *key) {
  size_t p = value_of(body, key);
  if (p == string::npos || body[p] != '"') return "";
  size_t q = body.find('"', p + 1);
  return q == string::npos ? "" : body.substr(p + 1, std::min<size_t>(q - p - 1, 100));
}

static double part(const string &model, char letter, double otherwise) {  // the number after "-letter" in a model's name
  string padded = "-" + model;
  for (size_t p = 0; (p = padded.find(string("-") + letter, p)) != string::npos; p += 2)
    if (isdigit((unsigned char)padded[p + 2])) return atof(padded.c_str() + p + 2);
  return otherwise;
}

// Answers -------------------------------------------------------------------------------------------------------------

static string framed(const string &event) {
  char size[16];
  snprintf(size, sizeof size, "%zx\r\n", event.size());
  return size + event + "\r\n";
}

static int64_t deadline_of(const Answer &a) {
  int64_t at = a.arrived + a.ttft + a.gap * (int64_t)a.sent;
  return a.aligned && a.gap > 0 ? (at + a.gap - 1) / a.gap * a.gap : at;
}

static string usage_of(const Answer &a) {
  size_t n = a.chunks * a.tokens_each;
  return "\"usage\":{\"prompt_tokens\":" + std::to_string(a.prompt_tokens) + ",\"completion_tokens\":" + std::to_string(n) +
         ",\"total_tokens\":" + std::to_string(n + a.prompt_tokens) + "}";
}

static void answer_at_once(int fd, const Answer &a) {
  string text;
  for (size_t k = 0; k < a.chunks; k++) text += " w" + std::to_string(k & 255);
  string inner = a.chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" + text + "\"}" : "\"text\":\"" + text + "\"";
  reply(fd, "{\"id\":\"x\",\"object\":\"chat.completion\",\"created\":1,\"choices\":[{\"index\":0,\"finish_reason\":\"length\"," +
                inner + "}]," + usage_of(a) + "}");
}

static void begin(int fd, const string &path, const string &body, int64_t at) {
  Connection &c = connections[fd];
  Answer *a = new Answer;
  string model = word(body, "model");
  const string schedule = part(model, 'i', -1) < 0 ? default_model : model;
  int64_t asked = integer(body, "max_tokens", integer(body, "max_completion_tokens", 128));
  a->arrived = at;
  a->rid = integer(body, "rid", requests);
  a->chat = path.find("/chat/") != string::npos;
  a->ttft = part(schedule, 't', 200) * 1e6;
  a->gap = part(schedule, 'i', 20) * 1e6;
  a->chunks = std::min<size_t>(std::max<int64_t>(1, part(schedule, 'n', asked)), MAX_CHUNKS);
  a->tokens_each = std::max(1, (int)part(schedule, 'k', 1));
  a->aligned = (schedule + "-").find("-b-") != string::npos;
  a->usage = truth(body, "include_usage");
  a->prompt_tokens = 1;
  for (char ch : body) a->prompt_tokens += ch == ' ';
  requests++;
  if (!truth(body, "stream")) {
    answer_at_once(fd, *a);
    delete a;
    return;
  }
  if (!first_ns) {
    first_ns = at;
    puts("request");
    fflush(stdout);
  }
  a->times.reserve(a->chunks);
  // About 215 bytes an event, as vLLM's.
  a->head = string("data: {\"id\":\"") + (a->chat ? "chatcmpl-" : "cmpl-") + std::to_string(10000000 + requests) +
            "\",\"object\":\"" + (a->chat ? "chat.completion.chunk" : "text_completion") +
            "\",\"created\":1760000000,\"model\":\"" + model + "\",\"choices\":[";
  c.answer = a;
  c.life++;
  if (++active > peak) peak = active;
  if (put(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
              "Transfer-Encoding: chunked\r\n\r\n"))
    deadlines.push({deadline_of(*a), fd, c.life});
}

static void emit(int fd) {
  Connection &c = connections[fd];
  Answer &a = *c.answer;
  bool last = a.sent + 1 == a.chunks;
  string event = a.head + "{\"index\":0,";
  if (a.chat) event += a.sent ? "\"delta\":{\"content\":\"" : "\"delta\":{\"role\":\"assistant\",\"content\":\"";
  else event += "\"text\":\"";
  for (int k = 0; k < a.tokens_each; k++) event += " w" + std::to_string((a.sent + k) & 255);
  event += a.chat ? "\"}" : "\"";
  event += ",\"logprobs\":null,\"finish_reason\":";
  event += last ? "\"length\"}]}\n\n" : "null}]}\n\n";
  string bytes = framed(event);
  a.sent++;
  chunks++;
  a.times.push_back(now_ns());
  if (!put(fd, bytes)) return;
  if (!last) {
    deadlines.push({deadline_of(a), fd, c.life});
    return;
  }
  string end;
  if (a.usage) end = framed(a.head + "]," + usage_of(a) + "}\n\n");
  end += framed("data: [DONE]\n\n") + "0\r\n\r\n";
  if (put(fd, end)) over(c, true);
}

// Control -------------------------------------------------------------------------------------------------------------

static string stats() {
  char o[512];
  snprintf(o, sizeof o,
           "{\"requests\":%" PRId64 ",\"finished\":%zu,\"active\":%" PRId64 ",\"peak\":%" PRId64 ",\"aborted\":%" PRId64
           ",\"chunks\":%" PRId64 ",\"first_ns\":%" PRId64 ",\"last_ns\":%" PRId64 ",\"cpu_s\":%.4f}",
           requests, logged.size(), active, peak, aborted, chunks, first_ns, last_ns, cpu_s() - cpu_before);
  return o;
}

static string log_of_all() {
  string o = "{\"requests\":[";
  for (const Logged &r : logged) {
    if (&r != &logged[0]) o += ',';
    o += "[" + std::to_string(r.rid) + "," + std::to_string(r.arrived) + "," + std::to_string(r.done) + "," +
         std::to_string(r.tokens) + ",[";
    for (size_t k = 0; k < r.times.size(); k++) o += (k ? "," : "") + std::to_string(r.times[k]);
    o += "]]";
  }
  return o + "]}";
}

static void reset() {
  logged.clear();
  chunks = requests = aborted = first_ns = last_ns = 0;
  times_kept = 0;
  peak = active;
  cpu_before = cpu_s();
}

static void dispatch(int fd, const string &path, const string &body, int64_t at) {
  if (path.find("completions") != string::npos) begin(fd, path, body, at);
  else if (path == "/log") reply(fd, log_of_all());
  else if (path == "/stats") reply(fd, stats());
  else if (path == "/reset") {
    reset();
    reply(fd, "{}");
  } else if (path.find("/models") != string::npos)
    reply(fd, "{\"object\":\"list\",\"data\":[{\"id\":\"" + default_model +
                  "\",\"object\":\"model\",\"created\":1,\"owned_by\":\"rig\",\"max_model_len\":131072}]}");
  else if (path == "/" || path.find("/health") != string::npos || path.find("server_info") != string::npos) reply(fd, "{}");
  else reply(fd, "{}", "404 Not Found");
}

static void read_requests(int fd) {  // as many whole ones as have arrived, each after the one before is answered
  Connection &c = connections[fd];
  while (c.open && !c.answer) {
    size_t end = c.in.find("\r\n\r\n");
    if (end == string::npos) return;
    string head = c.in.substr(0, end + 2), lower = head;
    for (char &ch : lower) ch = tolower((unsigned char)ch);
    size_t p = lower.find("\r\ncontent-length:");
    size_t length = p == string::npos ? 0 : strtoull(lower.c_str() + p + 17, nullptr, 10);
    if (length > MAX_REQUEST) return close_connection(fd);
    if (c.in.size() < end + 4 + length) {
      if (lower.find("expect: 100") != string::npos) put(fd, "HTTP/1.1 100 Continue\r\n\r\n");
      return;
    }
    string body = c.in.substr(end + 4, length);
    c.in.erase(0, end + 4 + length);
    size_t from = head.find(' '), to = from == string::npos ? from : head.find(' ', from + 1);
    if (to == string::npos) return close_connection(fd);
    dispatch(fd, head.substr(from + 1, to - from - 1), body, c.arrived);
  }
}

static void accept_all(int listener) {
  for (int n = 0; n < DUE_AT_ONCE; n++) {
    int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK), one = 1;
    if (fd < 0) return;
    if (fd >= MAX_FD) {
      close(fd);
      return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    int stamps = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPING, &stamps, sizeof stamps);
    Connection &c = connections[fd];
    c.open = true;
    c.life++;
    epoll_event e{};
    e.events = EPOLLIN;
    e.data.fd = fd;
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
  }
}

static int64_t received_ns(msghdr &message) {  // the kernel stamps in CLOCK_REALTIME
  timespec t;
  int64_t before = now_ns();
  clock_gettime(CLOCK_REALTIME, &t);
  int64_t after = now_ns(), ahead = t.tv_sec * 1000000000LL + t.tv_nsec - (before + after) / 2;
  cmsghdr *c = CMSG_FIRSTHDR(&message);
  if (!c || c->cmsg_type != SO_TIMESTAMPING) return before;
  memcpy(&t, CMSG_DATA(c), sizeof t);
  return std::min<int64_t>(before, t.tv_sec * 1000000000LL + t.tv_nsec - ahead);
}

static void ready(int fd, uint32_t events) {
  static char buffer[65536];
  Connection &c = connections[fd];
  if (c.open && (events & EPOLLOUT)) flush(fd);
  if (!c.open || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
  char control[256];
  iovec into = {buffer, sizeof buffer};
  msghdr message{};
  message.msg_iov = &into;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t k = recvmsg(fd, &message, MSG_DONTWAIT);
  c.arrived = k > 0 ? received_ns(message) : now_ns();
  if (k > 0 && c.in.size() + k <= MAX_REQUEST + sizeof buffer) {
    c.in.append(buffer, k);
    read_requests(fd);
  } else if (k >= 0 || errno != EAGAIN) {
    close_connection(fd);
  }
}

static void send_what_is_due() {
  for (int n = 0; n < DUE_AT_ONCE && !deadlines.empty() && deadlines.top().at <= now_ns(); n++) {
    Deadline due = deadlines.top();
    deadlines.pop();
    Connection &c = connections[due.fd];
    if (!c.open || c.life != due.life || !c.answer) continue;
    emit(due.fd);
    if (c.open && !c.answer && !c.in.empty()) read_requests(due.fd);  // the next one had come while we answered
  }
}

int main(int argc, char **argv) {
  if (argc < 2 || argc > 3) {
    fprintf(stderr, "usage: truth_server PORT [MODEL]\n");
    return 2;
  }
  if (argc > 2) default_model = argv[2];
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  prctl(PR_SET_TIMERSLACK, 1);  // sleeps end on time: the default slack is 50 µs
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(atoi(argv[1]));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, (sockaddr *)&address, sizeof address) || listen(listener, 4096)) {
    perror("truth_server");
    return 1;
  }
  socklen_t size = sizeof address;
  getsockname(listener, (sockaddr *)&address, &size);
  printf("listening http://127.0.0.1:%d\n", ntohs(address.sin_port));
  fflush(stdout);
  poller = epoll_create1(0);
  epoll_event e{}, events[512];
  e.events = EPOLLIN;
  e.data.fd = listener;
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
  cpu_before = cpu_s();
  for (;;) {
    timespec wait{3600, 0};
    if (!deadlines.empty()) {
      int64_t left = std::max<int64_t>(0, deadlines.top().at - now_ns());
      wait = {left / 1000000000, left % 1000000000};
    }
    int k = epoll_pwait2(poller, events, 512, &wait, nullptr);
    for (int n = 0; n < k; n++) {
      if (events[n].data.fd == listener) accept_all(listener);
      else ready(events[n].data.fd, events[n].events);
    }
    send_what_is_due();
  }
}
