// c_reader: the floor of what a client of truth_server must cost. It opens N connections, keeps one request on each until
// R are done (closed loop), reads and times the chunks, and parses nothing but the mark at the end of a body.
//
//   c_reader PORT MODEL CONNECTIONS REQUESTS MODE [APART_US]
//   MODE 0  read()                     MODE 1  read() and one clock reading for each
//   MODE 2  recvmsg() and the kernel's receive time     MODE 3  mode 1 and a search for every "data: "
//
// Connections begin APART_US one after the other (0: at once). Chunks that come spread cost more than chunks that come in
// step, whoever reads them, so a client that begins its streams apart is compared with a floor that does the same.
//
// Prints one JSON line: reads, bytes, CPU seconds, µs of CPU a read. Loopback only.

#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <linux/net_tstamp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { KEPT = 1 << 20, SILENCE_MS = 10000, MAX_CONNECTIONS = 60000 };

static int64_t times[KEPT];  // a ring: a client that keeps its times must write them somewhere
static char request[2048], buffer[65536];
static int request_length;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int connected(int port, int mode) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  if (connect(fd, (void *)&address, sizeof address)) {
    perror("connect");
    exit(1);
  }
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (mode == 2) {
    int flags = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;
    if (setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPING, &flags, sizeof flags)) perror("SO_TIMESTAMPING");
  }
  return fd;
}

// The bytes that were read; the kernel's time (CLOCK_REALTIME) goes to *at, where it gave one.
static ssize_t read_with_time(int fd, int64_t *at) {
  char control[256];
  struct iovec into = {buffer, sizeof buffer};
  struct msghdr message = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT);
  struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
  if (c && c->cmsg_type == SO_TIMESTAMPING) {
    struct timespec *t = (void *)CMSG_DATA(c);
    *at = t->tv_sec * 1000000000LL + t->tv_nsec;
  }
  return n;
}

int main(int argc, char **argv) {
  if (argc != 6 && argc != 7) {
    fprintf(stderr, "usage: c_reader PORT MODEL CONNECTIONS REQUESTS MODE [APART_US]\n");
    return 2;
  }
  int port = atoi(argv[1]), count = atoi(argv[3]), wanted = atoi(argv[4]), mode = atoi(argv[5]);
  int64_t apart_ns = argc > 6 ? atoi(argv[6]) * 1000LL : 0;
  if (count < 1 || count > MAX_CONNECTIONS || apart_ns < 0) return 2;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  char body[512];
  int length = snprintf(body, sizeof body,
                        "{\"model\":\"%.100s\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":true}", argv[2]);
  request_length = snprintf(request, sizeof request,
                            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                            "Content-Length: %d\r\n\r\n%s", length, body);
  int poller = epoll_create1(0), sent = 0, done = 0;
  struct epoll_event e = {.events = EPOLLIN}, events[512];
  int64_t reads = 0, bytes = 0, found = 0, stamped = 0, begun = now_ns();
  int opened = 0;
  while (done < wanted) {
    for (; opened < count && sent < wanted && now_ns() >= begun + opened * apart_ns; opened++, sent++) {
      e.data.fd = connected(port, mode);
      epoll_ctl(poller, EPOLL_CTL_ADD, e.data.fd, &e);
      if (send(e.data.fd, request, request_length, 0) != request_length) return 1;
    }
    int waiting = opened < count && sent < wanted;
    int k = epoll_wait(poller, events, 512, waiting ? 1 : SILENCE_MS);
    if (k < 0 || (k == 0 && !waiting)) break;
    for (int i = 0; i < k; i++) {
      int fd = events[i].data.fd;
      int64_t at = 0;
      ssize_t n = mode == 2 ? read_with_time(fd, &at) : recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
      if (n < 0 && errno == EAGAIN) continue;
      if (n <= 0) {
        close(fd);
        done++;
        continue;
      }
      stamped += at != 0;
      if (mode == 1 || mode == 3) at = now_ns();
      times[reads++ & (KEPT - 1)] = at;
      bytes += n;
      if (mode == 3)
        for (char *p = buffer; (p = memmem(p, buffer + n - p, "data: ", 6)); p += 6) found++;
      if (n >= 5 && !memcmp(buffer + n - 5, "0\r\n\r\n", 5)) {
        done++;
        if (sent < wanted && send(fd, request, request_length, 0) == request_length) sent++;
      }
    }
  }
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  double cpu = u.ru_utime.tv_sec + u.ru_stime.tv_sec + 1e-6 * (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
  printf("{\"mode\":%d,\"connections\":%d,\"requests\":%d,\"reads\":%" PRId64 ",\"bytes\":%" PRId64 ",\"events\":%" PRId64
         ",\"stamped\":%" PRId64 ",\"wall_s\":%.3f,\"cpu_s\":%.4f,\"us_per_read\":%.3f}\n",
         mode, count, done, reads, bytes, found, stamped, (now_ns() - begun) / 1e9, cpu, reads ? cpu * 1e6 / reads : 0);
  return done == wanted ? 0 : 1;
}
