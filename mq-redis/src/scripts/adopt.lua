-- Takes over what this member's name held in an earlier session: its handles are fenced, so nobody works on it.
-- KEYS: stream, due, tries. ARGV: group, member, most, start, whether the former holder died (1: counts as a take).
-- Answer: number of entries that are gone, entries as in take.lua.
local stream, tries = KEYS[1], KEYS[3]
local group, me, died = ARGV[1], ARGV[2], ARGV[5] == '1'
local got, gone, last = {}, 0, ''
for _, held in ipairs(redis.call('XPENDING', stream, group, ARGV[4], '+', ARGV[3], me)) do
  local id, count = held[1], held[4]
  if died then
    count = count + 1
  end
  last = id
  local entry = redis.call('XCLAIM', stream, group, me, 0, id, 'RETRYCOUNT', count)[1]
  if not entry or not entry[2] then
    redis.call('HDEL', tries, id)
    gone = gone + 1
  else
    got[#got + 1] = {id, count, redis.call('HGET', tries, id) or '', entry[2]}
  end
end
return {last, gone, got}
